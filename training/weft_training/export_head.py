"""Export of an MTP head into the model's folder: `python -m weft_training.export_head HEAD`.

The head becomes one more file of weights. The index lists it and config.json says that there is one; the other files
stay as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from weft import builtin

from weft_training.export import write_json
from weft_training.head import Head

FILE = "mtp.safetensors"
INDEX = "model.safetensors.index.json"


def export(head: Path, folder: Path) -> None:
    """Check the head's tensors, then write the file and list it. A head that the folder has already is replaced."""
    weights = load_file(head)
    expected = {
        f"mtp.{name}": tuple(p.shape) for name, p in Head(AutoConfig.from_pretrained(folder)).named_parameters()
    }
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wrong := [name for name in expected | found if expected.get(name) != found.get(name)]:
        raise SystemExit(f"{head}: not the head of {folder}: {', '.join(sorted(wrong))}")
    save_file(weights, folder / FILE, {"format": "pt"})
    (folder / FILE).chmod(0o644)
    index = read(folder / INDEX)
    places = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    index["weight_map"] = places | dict.fromkeys(sorted(weights), FILE)
    index["metadata"]["total_size"] = sum(size_of(folder / file) for file in set(index["weight_map"].values()))
    write_json(folder / INDEX, index)
    write_json(folder / "config.json", read(folder / "config.json") | {"mtp_num_hidden_layers": 1})


def size_of(file: Path) -> int:
    """The bytes of all tensors of a file."""
    with safe_open(file, "pt") as opened:
        return sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="the file of `weft_training.head`")
    parser.add_argument("--into", type=Path, default=builtin.FOLDER)
    asked = parser.parse_args()
    export(asked.head, asked.into)
    print(f"{(asked.into / FILE).stat().st_size / 2**20:.2f} MiB  {asked.into / FILE}")


if __name__ == "__main__":
    main()
