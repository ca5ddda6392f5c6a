"""Compare two source trees on one machine, alternating: did a refactoring cost anything?

    git worktree add ../before v0.1.0
    python -m benchmarks.trees ../before lfm2-1.2b nemotron-nano-9b-v2 --rounds 3

Each tree runs in its own process and loads the model once. Both processes hold their model at the same time and measure
in turn, so that a slow minute of the machine affects both. Prints the median of each figure and the ratio of this tree
to the other: above 1 is slower for times (ms) and faster for rates (tokens/s).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
ROWS = (1, 32, 128)
LENGTHS = (512, 8192)

Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="folder of the tree to compare with")
    parser.add_argument("models", nargs="+", help="names of packaged configurations, or config.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="30GiB", help="memory of each process for pages and states")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--no-serving", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    report: dict[str, Any] = {}
    for model in arguments.models:
        report[model] = compare(model, arguments)
        show(model, report[model])
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1))
    return 0


# parent process: compares ---------------------------------------------------------------------------------------------


def compare(model: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the figures of every round by name, for both trees."""
    began = time.perf_counter()
    workers = {"other": Worker(arguments.other, model, arguments), "this": Worker(HERE, model, arguments)}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    try:
        for worker in workers.values():
            worker.wait_until_loaded()
        print(f"\n{model}: both loaded after {time.perf_counter() - began:.0f} s", flush=True)
        for round_ in range(arguments.rounds):
            # Alternate the order, because the first of a round may find a cooler GPU.
            for name in list(workers) if round_ % 2 else reversed(list(workers)):
                for figure, value in workers[name].measure(round_).items():
                    found[name].setdefault(figure, []).append(value)
    finally:
        for worker in workers.values():
            worker.stop()
    return found


class Worker:
    """A process that holds one tree's model and measures when asked, one line of JSON each way."""

    def __init__(self, tree: Path, model: str, arguments: argparse.Namespace) -> None:
        options = ["--memory", arguments.memory, "--device", arguments.device, "--dtype", arguments.dtype, "--worker"]
        options += ["--rows", *map(str, arguments.rows), "--lengths", *map(str, arguments.lengths)]
        options += ["--no-serving"] if arguments.no_serving else []
        # -P: do not search the folder of this file, whose names (http.py) would hide Python's own modules.
        command = [sys.executable, "-P", __file__, str(tree), model, *options]
        path = os.pathsep.join([str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._tree = tree
        self._process = subprocess.Popen(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, text=True, **pipes)

    def wait_until_loaded(self) -> None:
        self._read()

    def measure(self, round_: int) -> Figures:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{round_}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self._tree} ended with code {self._process.wait()}; its error is above")
        found: Figures = json.loads(line)
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def show(model: str, found: dict[str, dict[str, list[float]]]) -> None:
    print(f"  {'':28} {'other':>10} {'this':>10} {'this/other':>11}   spread of both")
    for name in found["other"]:
        before, now = (statistics.median(found[tree][name]) for tree in ("other", "this"))
        spreads = [(max(each) - min(each)) / min(each) for each in (found["other"][name], found["this"][name])]
        spread = "  ".join(f"{each:.1%}" for each in spreads)
        print(f"  {name:28} {before:>10.4g} {now:>10.4g} {now / before:>11.3f}   {spread}", flush=True)


# child process: measures ----------------------------------------------------------------------------------------------


def work(arguments: argparse.Namespace) -> int:
    """Load the model of the tree on the path, then measure once for every line of the input."""
    # Libraries print to the standard output; redirect it, so that the pipe carries results only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from benchmarks.gpu import start, warm_up

    # All trees since the first version accept these options by these names.
    options = argparse.Namespace(device=arguments.device, dtype=arguments.dtype, memory=arguments.memory)
    longest = max(4096, *arguments.lengths) + 1024
    llm = start(arguments.models[0], options, depth=1, max_sequences=256, max_length=longest)
    warm_up(llm, rows=sorted({*arguments.rows, *(() if arguments.no_serving else (32, 128))}))
    # The first round compiles what is left; its result signals that the model is loaded.
    print(json.dumps(measure_once(llm, arguments)), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure_once(llm, arguments)), file=answers, flush=True)
    return 0


def measure_once(llm: Any, arguments: argparse.Namespace) -> Figures:
    from benchmarks.decode import time_steps
    from benchmarks.gpu import fresh, random_prompt
    from benchmarks.prefill import first_token
    from benchmarks.serving import conversations, shared_prefix

    found: Figures = {}
    for rows in arguments.rows:
        found[f"decode {rows} rows, ms"] = time_steps(llm, rows, 128)[0] * 1e3
    for length in arguments.lengths:
        times = [first_token(fresh(llm), random_prompt(llm, length, length, n)) for n in range(5)]
        found[f"prompt of {length}, ms"] = statistics.median(times) * 1e3
    if not arguments.no_serving:
        shared = shared_prefix(llm)
        for name in ("first", "second"):
            found[f"shared prefix {name}, tokens/s"] = shared[name]["tokens_per_second"]
        found["conversations, tokens/s"] = conversations(llm)["tokens_per_second"]
    return found


if __name__ == "__main__":
    sys.exit(main())
