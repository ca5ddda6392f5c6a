"""Texts and dialogues into numbers: `python -m training.pack DATA`. A hundredth of each source is held out.

Writes packed/<source>.train.bin and .held.bin (uint16, texts one behind the other, each ended by <|endoftext|>), and
what they are in packed/sources.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from training.template import OVER, written

HELD_OUT = 100
AT_ONCE = 4096


def documents(file: Path) -> Iterator[str]:
    """A text, or a conversation as the model sees it."""
    for line in file.open():
        entry = json.loads(line)
        yield entry["text"] if isinstance(entry, dict) else written([tuple(each) for each in entry])


def is_held_out(text: str) -> bool:
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big") % HELD_OUT == 0


def pack(file: Path, tokenizer: Tokenizer, into: Path) -> dict[str, dict[str, int]]:
    over = tokenizer.token_to_id(OVER)
    counts = {part: {"tokens": 0, "bytes": 0, "texts": 0} for part in ("train", "held")}
    outs = {part: (into / f"{file.stem}.{part}.bin").open("wb") for part in counts}
    waiting: list[str] = []

    def flush() -> None:
        for text, encoding in zip(waiting, tokenizer.encode_batch(waiting)):
            part = "held" if is_held_out(text) else "train"
            ids = np.array([*encoding.ids, over], np.uint16)
            outs[part].write(ids.tobytes())
            counts[part]["tokens"] += len(ids)
            counts[part]["bytes"] += len(text.encode())
            counts[part]["texts"] += 1
        waiting.clear()

    for text in tqdm(documents(file), desc=file.stem):
        waiting.append(text)
        if len(waiting) == AT_ONCE:
            flush()
    flush()
    for out in outs.values():
        out.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    into = data / "packed"
    into.mkdir(exist_ok=True)
    files = [f for f in sorted((data / "text").glob("*.jsonl")) if f.stem != "talk"]
    files += sorted((data / "dialogues").glob("*.jsonl"))
    found = {file.stem: pack(file, tokenizer, into) for file in files}
    (into / "sources.json").write_text(json.dumps(found, indent=1))
    for name, counts in found.items():
        train = counts["train"]
        print(
            f"{name}: {train['tokens'] / 1e6:.1f} M tokens, {train['bytes'] / max(1, train['tokens']):.2f} bytes each"
        )


if __name__ == "__main__":
    main()
