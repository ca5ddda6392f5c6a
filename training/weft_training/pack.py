"""Texts and dialogues into numbers: `python -m weft_training.pack DATA`. A hundredth of each source is held out.

Writes packed/<source>.train.bin and .held.bin (uint16, texts one behind the other, each ended by <|endoftext|>), and
what they are in packed/sources.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain, groupby, islice, takewhile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from weft_training.dialogues import is_good
from weft_training.template import OVER, written

HELD_OUT = 0.01
# So many conversations begin with a system message.
WITH_SYSTEM = 0.15
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in a few short and simple sentences.",
    "Answer briefly.",
    "You are Weft, a small language model.",
)
AT_ONCE = 4096
# What the rules of made/ answer better than a small teacher does.
COVERED = re.compile(
    r"(?i)i feel|i am|my |tell me|what is|what do|explain|describe|can you explain|.*\bstory\b|.*\bpoem\b"
)


def documents(file: Path) -> Iterator[str]:
    """Pieces of a text, or a conversation as the model sees it."""
    for line in file.open():
        entry = json.loads(line)
        if isinstance(entry, dict):
            yield from pieces(entry["text"])
        else:
            exchanges = [tuple(each) for each in entry]
            if file.name.startswith("taught"):
                # The teacher need not be asked again when we become more choosy.
                exchanges = list(takewhile(lambda each: is_good(each[1], said=each[0]), exchanges))
                if exchanges and COVERED.match(exchanges[0][0]):
                    continue
            if not exchanges:
                continue
            draw = fraction_of(line)
            yield written(exchanges, SYSTEMS[int(draw * 100) % len(SYSTEMS)] if draw < WITH_SYSTEM else None)


def pieces(text: str, most: int = 2_500) -> Iterator[str]:
    """A long text cut at the ends of lines, so that most are seen whole in a window.

    >>> list(pieces("one\\ntwo\\nthree", most=9))
    ['one\\ntwo\\n', 'three']
    """
    while len(text) > most:
        cut = text.rfind("\n", 1, most) + 1 or most
        yield text[:cut]
        text = text[cut:]
    yield text


def fraction_of(text: str) -> float:
    """A number from 0 to 1 that depends on the text alone."""
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big") / 2**32


def is_held_out(text: str) -> bool:
    return fraction_of(text) < HELD_OUT


def pack(name: str, files: list[Path], tokenizer: Tokenizer, into: Path) -> dict[str, dict[str, int]]:
    over = tokenizer.token_to_id(OVER)
    counts = {part: {"tokens": 0, "bytes": 0, "texts": 0} for part in ("train", "held")}
    outs = {part: (into / f"{name}.{part}.bin").open("wb") for part in counts}
    texts = chain.from_iterable(map(documents, files))
    with tqdm(desc=name) as bar:
        while some := list(islice(texts, AT_ONCE)):
            for text, encoding in zip(some, tokenizer.encode_batch(some)):
                part = "held" if is_held_out(text) else "train"
                ids = np.array([*encoding.ids, over], np.uint16)
                outs[part].write(ids.tobytes())
                counts[part]["tokens"] += len(ids)
                counts[part]["bytes"] += len(text.encode())
                counts[part]["texts"] += 1
            bar.update(len(some))
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
    files = sorted((data / "text").glob("*.jsonl")) + sorted((data / "dialogues").glob("*.jsonl"))
    # What several teachers wrote side by side is one source: taught.0.jsonl, taught.1.jsonl, ...
    sources = {name: list(some) for name, some in groupby(files, lambda file: file.name.split(".")[0])}
    found = {name: pack(name, some, tokenizer, into) for name, some in sources.items()}
    (into / "sources.json").write_text(json.dumps(found, indent=1))
    for name, counts in found.items():
        train = counts["train"]
        print(
            f"{name}: {train['tokens'] / 1e6:.1f} M tokens, {train['bytes'] / max(1, train['tokens']):.2f} bytes each"
        )


if __name__ == "__main__":
    main()
