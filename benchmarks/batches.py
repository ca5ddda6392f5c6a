"""Compare decode steps of several rows, and a prefill, with llama.cpp: `python -m benchmarks.batches --threads 1`.

Both engines run the same random model of SmolLM2-135M's shape, each in its own process, alternating. A decode step is
the difference between long and short answers to the same number of prompts, so prefill and HTTP cancel out. CPU time
is the sum of all threads: with one thread it hardly depends on other programs on the machine, unlike wall time. Needs
the extra `bench`, and llama.cpp's converter, which is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu import CACHE
from benchmarks.peers.checkpoints import checkpoint
from benchmarks.peers.gguf import gguf
from benchmarks.peers.table import machine
from benchmarks.peers.work import Engine, Job, Work, random_tokens

DRIVERS = {"weft": ("with_weft", "Weft"), "llama.cpp": ("with_llama_cpp", "LlamaCpp")}
# llama.cpp's usual 16 bits are float16; Weft has bfloat16 only.
RUNS = (("weft", "float32"), ("llama.cpp", "float32"), ("weft", "bfloat16"), ("llama.cpp", "bfloat16"),
        ("llama.cpp", "float16"))  # fmt: skip
INSTRUCTIONS = {"avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16"} | {
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"}  # fmt: skip
ROWS = (1, 4, 16)
PREFILL = 512
PROMPT, SHORT, LONG = 16, 8, 40


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of wall and CPU time."""

    wall: float
    cpu: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)


def timed(work: Callable[[], Any]) -> Spent:
    before = Spent(time.perf_counter(), time.process_time())
    work()
    return Spent(time.perf_counter(), time.process_time()) - before


def measure(engine: Engine, repeats: int) -> dict[str, list[float]]:
    """Return wall and CPU milliseconds of a step by its rows, and of the prefill; the best of the repetitions."""
    found: dict[str, list[float]] = {}
    for rows in ROWS:
        steps = []
        for repeat in range(repeats):
            prompts = [random_tokens(f"{rows} {repeat} {row}", PROMPT) for row in range(rows)]
            again = [[*prompt, 5] for prompt in prompts]
            short = timed(partial(engine.crowd, prompts, SHORT))
            steps.append(timed(partial(engine.crowd, again, LONG)) - short)
        found[f"{rows} rows"] = [1000 / (LONG - SHORT) * best for best in best_of(steps)]
    prefills = [timed(partial(engine.crowd, [random_tokens(f"long {each}", PREFILL)], 1)) for each in range(repeats)]
    found[f"prefill of {PREFILL}"] = [1000 * best for best in best_of(prefills)]
    return found


def best_of(spent: list[Spent]) -> tuple[float, float]:
    return min(each.wall for each in spent), min(each.cpu for each in spent)


def work(job: Path, target: Path) -> None:
    """Measure one engine in this process."""
    asked = Job.read(job)
    module, name = DRIVERS[asked.engine]
    engine: Engine = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)(asked)
    engine.crowd([random_tokens(f"warm {row}", PROMPT) for row in range(max(ROWS))], SHORT)
    target.write_text(json.dumps(measure(engine, asked.work.crowd_repeats)))


def run(engine: str, precision: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    folder = checkpoint("smollm2", arguments.cache)
    file = str(gguf(folder, precision, arguments.cache)) if engine == "llama.cpp" else None
    room = Work(requests=max(ROWS), single_prompt=PREFILL, single_answer=LONG, shared=PREFILL, answer=LONG,
                crowd_repeats=arguments.repeats)  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        job, target = Path(place) / "job", Path(place) / "result"
        Job(engine, str(folder), file, precision, arguments.threads, room).write(job)
        command = [sys.executable, "-m", "benchmarks.batches", "--work", str(job), str(target)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, list[float]] = json.loads(target.read_text())
    return found


def flags() -> str:
    """Return the processor's instructions that matter for matmuls."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    known = next(
        (line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )
    return " ".join(sorted(INSTRUCTIONS & set(known)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.batches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions in a round; the best one counts")
    parser.add_argument("--runs", nargs="*", type=int, default=range(len(RUNS)), help="numbers of engines and weights")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--work", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
        return 0
    print(machine(arguments.threads), flags(), sep="\n", flush=True)
    found: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    for _ in range(arguments.rounds):
        for each in (RUNS[number] for number in arguments.runs):
            found.setdefault(each, []).append(run(*each, arguments))
            print(*each, found[each][-1], flush=True)
    print(table(found))
    return 0


def table(found: dict[tuple[str, str], list[dict[str, list[float]]]]) -> str:
    kinds = list(next(iter(found.values()))[0])
    lines = ["| engine | weights | " + " | ".join(kinds) + " |", "|---|---|" + "---:|" * len(kinds)]
    for (engine, precision), rounds in found.items():
        cells = [
            " / ".join(f"{median(each[kind][place] for each in rounds):.1f}" for place in (0, 1)) for kind in kinds
        ]
        lines.append(f"| {engine} | {precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
