"""Start-up and memory of a model that is cut over ranks, against one process: an engine process until it is ready.

    python -m benchmarks.rank_start [FOLDER] [--ranks 2] [--repeats 3] [--layers 16]

FOLDER is a checkpoint. Without one, LFM2-1.2B with random weights in bfloat16 is written to a temporary folder, with
the first `--layers` layers; this needs transformers. The checkpoint is read once before, so that every start finds it
in the page cache. Starts alternate between one process and all ranks; the last lines compare the medians and the
fastest of each. On a busy machine, compare CPU seconds: with a core for each rank, a start takes about as long as its
slowest process computes.

Memory of a process is what it has beyond one that has only imported Weft, from /proc/PID/smaps_rollup. The weights'
share of a rank is computed from their shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

MODEL = "lfm2-1.2b"
IDLE = "import sys, weft.start.loading; print('ready', flush=True); sys.stdin.read()"
LOADING = """
import sys
from weft.base.options import Options
from weft.start.engine_process import load_engine
options = {"memory": "64MiB", "max_length": 1024, "device": "cpu"}
engine, _ = load_engine(Options(model=sys.argv[1], tensor_parallel=int(sys.argv[2]), **options), False)
print("ready", flush=True)
sys.stdin.read()
engine.close()
"""


@dataclass(frozen=True, slots=True)
class MeasuredStart:
    """One start: seconds until ready, and the CPU seconds and memory of each of its processes."""

    seconds: float
    cpu_seconds: tuple[float, ...]
    resident_bytes: tuple[int, ...]


def start(code: str, *arguments: str) -> MeasuredStart:
    """Run a program until it says that it is ready, measure it, and end it."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    line = process.stdout.readline()
    seconds = time.monotonic() - began
    if line != "ready\n":
        raise SystemExit(f"the program was not ready, but said {line!r}")
    family = [process.pid, *children_of(process.pid)]
    found = MeasuredStart(seconds, tuple(map(cpu_seconds, family)), tuple(map(resident_bytes, family)))
    process.stdin.close()
    process.wait()
    return found


def children_of(number: int) -> list[int]:
    found = [task.read_text().split() for task in Path(f"/proc/{number}/task").glob("*/children")]
    return sorted(int(child) for children in found for child in children)


def cpu_seconds(number: int) -> float:
    values = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(number: int) -> int:
    lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def weight_shares(folder: Path, ranks: int) -> list[float]:
    """Return each rank's share of the weights' bytes."""
    import torch

    from weft.models.config import read_config, text_part
    from weft.models.sharding import Shard
    from weft.models.weights import build

    def size(shard: Shard) -> int:
        model = build(text_part(read_config(folder / "config.json")), torch.bfloat16, "meta", shard=shard)
        return sum(each.numel() * each.element_size() for each in model.parameters())

    whole = size(Shard())
    return [size(Shard(rank, ranks)) / whole for rank in range(ranks)]


def write_checkpoint(folder: Path, layers: int) -> Path:
    """Write a model of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from weft.models import configurations

    values: dict[str, Any] = json.loads(configurations.find(MODEL).read_text())
    layers = min(layers, int(values["num_hidden_layers"]))
    values["num_hidden_layers"] = layers
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:layers]
    if "full_attn_idxs" in values:
        values["full_attn_idxs"] = [each for each in values["full_attn_idxs"] if each < layers]
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    # Not initialised by transformers, which takes a minute.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    for weight in model.parameters():
        weight.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder)
    return folder


def measure(folder: Path, ranks: int, repeats: int) -> None:
    for file in folder.glob("*.safetensors"):
        file.read_bytes()
    idle = min((start(IDLE) for _ in range(2)), key=lambda each: each.seconds)
    print(f"imports alone: {shown(idle)}", flush=True)
    starts: dict[int, list[MeasuredStart]] = {1: [], ranks: []}
    for _ in range(repeats):
        for count, found in starts.items():
            found.append(start(LOADING, str(folder), str(count)))
            print(f"{count} ranks: {shown(found[-1])}", flush=True)
    alone, cut = (min(starts[count], key=lambda each: each.seconds) for count in (1, ranks))
    usual_alone, usual = (median(each.seconds for each in starts[count]) for count in (1, ranks))
    memory = alone.resident_bytes[0] - idle.resident_bytes[0]
    shares = ", ".join(f"{(each - idle.resident_bytes[0]) / memory:.2f}" for each in cut.resident_bytes)
    weights = ", ".join(f"{share:.3f}" for share in weight_shares(folder, ranks))
    print(
        f"start-up with {ranks} ranks / alone: {usual / usual_alone:.2f} ({usual:.2f} s, {usual_alone:.2f} s; medians)"
    )
    print(f"fastest: {cut.seconds / alone.seconds:.2f} ({cut.seconds:.2f} s, {alone.seconds:.2f} s)")
    print(f"CPU time of the slowest of {ranks} ranks / alone: {max(cut.cpu_seconds) / alone.cpu_seconds[0]:.2f}")
    print(f"memory alone: {memory / 2**20:.0f} MiB; of each rank / alone: {shares}; weights by shape: {weights}")


def shown(found: MeasuredStart) -> str:
    times = ", ".join(f"{each:.2f} s" for each in found.cpu_seconds)
    return f"ready after {found.seconds:.2f} s, CPU time of each process {times}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_start", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="weft-rank-start-") as made:
        folder = arguments.folder or write_checkpoint(Path(made), arguments.layers)
        measure(folder, arguments.ranks, arguments.repeats)


if __name__ == "__main__":
    main()
