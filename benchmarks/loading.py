"""Load a checkpoint of real size as a GPU would get it, and print the host memory and the rate beside `dd`.

    python -m benchmarks.loading FOLDER
    python -m benchmarks.loading FOLDER --model qwen3.5-9b --layers 8 --rounds 3

It writes a checkpoint of Qwen3.5-35B-A3B in FP8 (35 GB), loads it, and removes it. Names, shapes and dtypes are those
of a published one, in files of 4 GB; the bytes are random. Every matrix takes its way to a GPU. What would
lie there is dropped as soon as its matrix is whole, so that a machine with less memory than the model can load it. Host
memory is the most anonymous memory of the process beyond what it had before, including the one matrix, or the experts
of one layer, that would be on the GPU. Plain numbers stay, as their tensors are filled piece by piece; they would be on
the GPU too, and are listed. `dd` reads the same files. Before each reading the files leave the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.kernels.formats.stored import DENSE
from weft.models import weights
from weft.models.config import checkpoint_config, text_part
from weft.models.finding import find_checkpoint
from weft.models.model import MatrixLayer, sources

FILE_BYTES, BLOCK_BYTES, CODES = 4 << 30, 16 << 20, 128
# What public recipes leave in 16 bits.
WIDE = ("lm_head", "embed_tokens", "in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "conv1d")
QUANTISED = {
    "quant_method": "fp8", "weight_block_size": [CODES, CODES],
    "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate"],
}  # fmt: skip

Tensors = list[tuple[str, str, tuple[int, ...], int]]


def tensors_of(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, dtype, shape and bytes of everything that a checkpoint has. Experts are stored one by one."""
    model = weights.build(text_part(config), torch.bfloat16, declare=True)
    seen: set[str] = set()
    for source in sources(model):
        name, shape = source.name, tuple(source.stored_shape)
        if name in seen or re.search(r"\.experts\.[a-z_]+$", name):
            continue
        seen.add(name)
        size = int(np.prod(shape))
        is_wide = len(shape) != 2 or any(f".{part}." in f".{name}" for part in WIDE)
        if is_wide:
            yield name, "BF16", shape, 2 * size
            continue
        blocks = -(-shape[0] // CODES), -(-shape[1] // CODES)
        yield name, "F8_E4M3", shape, size
        yield f"{name}_scale_inv", "F32", blocks, 4 * int(np.prod(blocks))


def write(folder: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint; return its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISED}))
    files: list[Tensors] = [[]]
    for each in tensors_of(config):
        if sum(size for *_, size in files[-1]) + each[-1] > FILE_BYTES:
            files.append([])
        files[-1].append(each)
    # No code of these bytes is NaN, and no float is large, whatever the dtype.
    noise = np.random.default_rng(0).integers(0, 0x3C, BLOCK_BYTES, np.uint8).tobytes()
    names, total = {}, 0
    for number, tensors in enumerate(files):
        path, place, header = folder / f"model-{number:05}.safetensors", 0, {}
        for name, dtype, shape, size in tensors:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
            names[name], place = path.name, place + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for start in range(0, place, BLOCK_BYTES):
                file.write(noise[: min(BLOCK_BYTES, place - start)])
            file.flush()
            os.fsync(file.fileno())
        total += place
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return total


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_dd(folder: Path) -> float:
    begun = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M"], check=True, capture_output=True)
    return time.perf_counter() - begun


def anonymous() -> int:
    """Return the anonymous memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Watched(threading.Thread):
    """The most anonymous memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            self.most = max(self.most, anonymous())


def load(folder: Path) -> tuple[float, int, int]:
    """Return the seconds, the most anonymous memory, and the bytes of plain numbers that stayed."""
    model_config = text_part(checkpoint_config(folder))
    model = weights.build(model_config, torch.bfloat16, declare=True)
    kept = MatrixLayer.store
    plain = 0

    def store(layer: MatrixLayer, name: str, parts: Any) -> None:
        nonlocal plain
        if all(part.format is DENSE for part in parts):
            plain += sum(part.bytes for part in parts)
            kept(layer, name, parts)
        else:
            kept(layer, name, tuple(part.to("meta") for part in parts))

    MatrixLayer.store = store  # type: ignore[method-assign]
    # On a CPU, a model that is larger than the memory is refused.
    weights.check_size = lambda *_: None  # type: ignore[assignment]
    before, watched = anonymous(), Watched()
    watched.start()
    begun = time.perf_counter()
    weights.fill_from(model, folder, model_config, False, "cpu")
    seconds = time.perf_counter() - begun
    watched.ended.set()
    watched.join()
    return seconds, watched.most - before, plain


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the checkpoint; it must not exist")
    parser.add_argument("--model", default="qwen3.5-35b-a3b", help="name of a packaged configuration")
    parser.add_argument("--layers", type=int, help="number of layers to load; default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(load(arguments.folder)))
        return 0
    config = checkpoint_config(find_checkpoint(arguments.model, with_weights=False))
    if arguments.layers is not None:
        inner = config.get("text_config", config)
        inner["num_hidden_layers"] = arguments.layers
        if "layer_types" in inner:
            inner["layer_types"] = inner["layer_types"][: arguments.layers]
    try:
        begun = time.perf_counter()
        size = write(arguments.folder, config)
        print(f"{size / 1e9:.2f} GB written in {time.perf_counter() - begun:.0f} s", flush=True)
        ratios = []
        for number in range(arguments.rounds):
            found: dict[str, Any] = {}
            for way in ("dd", "weft") if number % 2 == 0 else ("weft", "dd"):
                forget(arguments.folder)
                if way == "dd":
                    found[way] = by_dd(arguments.folder)
                else:
                    # A process of its own: what an earlier round has freed would count as memory that is there.
                    command = [sys.executable, "-m", "benchmarks.loading", str(arguments.folder), "--here"]
                    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    found[way], most, plain = json.loads(answer.splitlines()[-1])
            ratios.append(found["dd"] / found["weft"])
            print(
                f"dd {size / found['dd'] / 1e9:.2f} GB/s, loading {size / found['weft'] / 1e9:.2f} GB/s: "
                f"{ratios[-1]:.2f} of it; host memory {most / 1e9:.2f} GB, of which plain numbers of the GPU "
                f"{plain / 1e9:.2f} GB",
                flush=True,
            )
        print(f"median of {len(ratios)}: {statistics.median(ratios):.2f}")
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
