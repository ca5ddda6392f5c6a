"""Compare decode steps of several rows, and a prefill, with llama.cpp, restricted to the same instructions.

    python -m benchmarks.batches --threads 1
    python -m benchmarks.batches --isa avx2 --weights bf16 q8_0 --rows 1 16 --threads 2

Both engines run the same random model of SmolLM2-135M's shape, each in its own process, alternating. Weft's decode step
is the difference between long and short answers to the same number of prompts, so prefill cancels out; llama.cpp is
called by a program of ours (`peers/llama_steps.cpp`), which is built for the instruction set at the first run, unless
`--llama` names one. CPU time is the sum of all threads: with one thread it hardly depends on other programs on the
machine, unlike wall time. Figures are medians of the rounds.

Weft has weights of 32 and 16 bits only, so its bfloat16 stands beside llama.cpp's float16, 8 and 4 bits.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.peers.instructions import RESTRICTIONS, flags, restricted
from benchmarks.peers.llama_build import build
from benchmarks.peers.table import machine
from benchmarks.peers.work import Engine, Job, Work, random_tokens

# llama.cpp's weights, and the dtype of ours that is compared with them.
WEIGHTS = {"f32": "float32", "bf16": "bfloat16", "f16": "bfloat16", "q8_0": "bfloat16", "q4_0": "bfloat16"}
ROWS = (1, 2, 4, 8, 16, 32)
PREFILL = 512
PROMPT, SHORT, LONG = 16, 8, 40

# Wall and CPU milliseconds, by number of rows, and of the prefill.
Found = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of wall and CPU time."""

    wall: float
    cpu: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)


def timed(work: Callable[[], Any]) -> Spent:
    before = Spent(1e3 * time.perf_counter(), 1e3 * time.process_time())
    work()
    return Spent(1e3 * time.perf_counter(), 1e3 * time.process_time()) - before


def measure(engine: Engine, repeats: int, numbers: list[int]) -> Found:
    """Return the times of a step by its rows, and of the prefill; the best of the repetitions."""
    found: Found = {}
    for rows in numbers:
        steps = []
        for repeat in range(repeats):
            prompts = [random_tokens(f"{rows} {repeat} {row}", PROMPT) for row in range(rows)]
            again = [[*prompt, 5] for prompt in prompts]
            short = timed(partial(engine.crowd, prompts, SHORT))
            steps.append(timed(partial(engine.crowd, again, LONG)) - short)
        found[str(rows)] = [best / (LONG - SHORT) for best in best_of(steps)]
    prefills = [timed(partial(engine.crowd, [random_tokens(f"long {each}", PREFILL)], 1)) for each in range(repeats)]
    found["prefill"] = list(best_of(prefills))
    return found


def best_of(spent: list[Spent]) -> tuple[float, float]:
    return min(each.wall for each in spent), min(each.cpu for each in spent)


def work(job: Path, target: Path, numbers: list[int]) -> None:
    """Measure Weft in this process."""
    from benchmarks.peers.with_weft import Weft

    asked = Job.read(job)
    engine = Weft(asked)
    engine.crowd([random_tokens(f"warm {row}", PROMPT) for row in range(max(numbers))], SHORT)
    target.write_text(json.dumps(measure(engine, asked.work.crowd_repeats, numbers)))


def run_weft(dtype: str, arguments: argparse.Namespace) -> Found:
    room = Work(requests=max(arguments.rows), single_prompt=PREFILL, single_answer=LONG, shared=PREFILL, answer=LONG,
                crowd_repeats=arguments.repeats)  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        job, target = Path(place) / "job", Path(place) / "result"
        folder = checkpoint("smollm2", arguments.cache)
        Job("weft", str(folder), None, dtype, arguments.threads, room).write(job)
        rows = ["--rows", *map(str, arguments.rows)]
        command = [sys.executable, "-m", "benchmarks.batches", *rows, "--work", str(job), str(target)]
        done = subprocess.run(command, env=restricted(arguments.isa), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"Weft failed:\n{done.stderr[-2000:]}")
        found: Found = json.loads(target.read_text())
    return found


def run_llama(kind: str, program: Path, arguments: argparse.Namespace) -> Found:
    file = converted(kind, program, arguments)
    numbers = [arguments.threads, arguments.repeats, PROMPT, SHORT, LONG, PREFILL, *arguments.rows]
    found: Found = json.loads(_output(program, "time", file, *numbers))
    return found


def converted(kind: str, program: Path, arguments: argparse.Namespace) -> Path:
    """Return the model with weights of this kind for llama.cpp; create it if needed."""
    source = gguf(checkpoint("smollm2", arguments.cache), "float32", arguments.cache)
    if kind == "f32":
        return source
    target = source.with_name(f"smollm2-{kind}.gguf")
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        unfinished = target.with_suffix(".unfinished")
        _output(program, "quantize", source, unfinished, arguments.threads, kind)
        unfinished.rename(target)
    return target


def _output(program: Path, *values: object) -> str:
    done = subprocess.run([program.resolve(), *map(str, values)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"llama.cpp failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.batches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--isa", choices=RESTRICTIONS, default="native", help="restrict both engines to these instructions"
    )
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=list(WEIGHTS), help="kinds of llama.cpp")
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="repetitions in a round; the best one counts")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further run after this")
    parser.add_argument("--llama", type=Path, help="a program of benchmarks.peers.llama_build for these instructions")
    parser.add_argument("--prepare", action="store_true", help="only build and convert what the run needs")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--work", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work, arguments.rows)
        return 0
    program = arguments.llama or build(arguments.isa, arguments.cache / f"llama-steps-{arguments.isa}", arguments.cache)
    if arguments.prepare:
        for kind in arguments.weights:
            converted(kind, program, arguments)
        return 0
    print(machine(arguments.threads), f"{flags()}; restricted to: {arguments.isa}", sep="\n", flush=True)
    found: dict[str, list[Found]] = {}
    until = time.monotonic() + arguments.seconds
    for _ in range(arguments.rounds):
        for name in order(arguments.weights):
            if time.monotonic() > until:
                break
            result = run_llama(name, program, arguments) if name in WEIGHTS else run_weft(name, arguments)
            found.setdefault(name, []).append(result)
            print(json.dumps({name: result}), flush=True)
    for place, clock in enumerate(("wall", "CPU")):
        print(table(found, arguments.weights, place, f"{clock} ms"), sep="\n", flush=True)
    return 0


def order(weights: list[str]) -> list[str]:
    """Return the runs of a round: each of llama.cpp's after ours that it is compared with.

    >>> order(["f32", "bf16", "q8_0"])
    ['float32', 'f32', 'bfloat16', 'bf16', 'q8_0']
    """
    return list(dict.fromkeys(name for kind in weights for name in (WEIGHTS[kind], kind)))


def table(found: dict[str, list[Found]], weights: list[str], place: int, title: str) -> str:
    """Return Weft's time, llama.cpp's, and how many times as fast Weft is, for the weights that both have run with."""
    kinds = list(next(iter(found.values()))[0])
    heads = [kind if kind == "prefill" else f"{kind} rows" for kind in kinds]
    lines = ["", f"| {title}: Weft, llama.cpp (ratio) | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(kinds)]
    middle = {
        name: {kind: median(each[kind][place] for each in rounds) for kind in kinds} for name, rounds in found.items()
    }
    for name in (each for each in weights if {each, WEIGHTS[each]} <= found.keys()):
        own, other = middle[WEIGHTS[name]], middle[name]
        cells = [f"{own[kind]:,.1f}, {other[kind]:,.1f} ({other[kind] / own[kind]:.2f})" for kind in kinds]
        lines.append(f"| {WEIGHTS[name]}, {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
