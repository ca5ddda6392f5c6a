"""Compare source trees and their options on one machine, in turn: did a change cost anything, and do defaults?

    git worktree add ../before v0.1.0
    python -m benchmarks.trees lfm2-1.2b nemotron-nano-9b-v2 --columns ../before .
    python -m benchmarks.trees lfm2-1.2b --columns ../before .:draft=off . --rounds 7
    python -m benchmarks.trees config.json --device cpu --rows 1 --lengths --no-serving --greedy --context 8000 \
        --columns .:draft=off .:draft=off,kv_dtype=int8

A column is the folder of a tree, with options of `weft.LLM` after a colon; without any, it has the defaults that a user
gets. Each column runs in its own process, loads the model once, and holds it while the others measure, so that a slow
minute of the machine affects all. Prints the median of each figure and its spread (the range of the middle half of the
rounds), and the ratio of each column to the first: above 1 is slower for times (ms) and faster for rates (tokens/s).

Greedy answers of random weights repeat themselves, so some drafts are right. Sampled answers do not: what the default
loses there is what drafts cost where they are of no use.
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

ROWS = (1, 32, 128)
LENGTHS = (512, 8192)
SHORT_ANSWER = 128

Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="names of packaged configurations, or config.json")
    parser.add_argument(
        "--columns", nargs="+", default=[".:draft=off", "."], metavar="TREE[:OPTION=VALUE,...]", help="what is compared"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", default="20GiB", help="memory of each process for pages and states")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--answer", type=int, default=SHORT_ANSWER, help="tokens that each row decodes")
    parser.add_argument("--context", type=int, default=100, help="tokens before those that a row decodes")
    parser.add_argument("--greedy", action="store_true", help="sample no answers")
    parser.add_argument("--no-serving", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
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
    """Return the figures of every round by name, for each column."""
    began = time.perf_counter()
    workers: dict[str, Worker] = {}
    found: dict[str, dict[str, list[float]]] = {column: {} for column in arguments.columns}
    try:
        for column in arguments.columns:
            # One after the other: a start measures the memory that is free.
            workers[column] = Worker(column, model, arguments)
            workers[column].wait_until_loaded()
        print(f"\n{model}: all loaded after {time.perf_counter() - began:.0f} s", flush=True)
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
    """A process that holds one column's model and measures when asked, one line of JSON each way."""

    def __init__(self, column: str, model: str, arguments: argparse.Namespace) -> None:
        tree, _, changes = column.partition(":")
        options = ["--memory", arguments.memory, "--device", arguments.device, "--dtype", arguments.dtype]
        options += ["--answer", str(arguments.answer), "--context", str(arguments.context), "--worker", changes]
        options += ["--rows", *map(str, arguments.rows), "--lengths", *map(str, arguments.lengths)]
        options += ["--no-serving"] if arguments.no_serving else []
        options += ["--greedy"] if arguments.greedy else []
        # -P: do not search the folder of this file, whose names (http.py) would hide Python's own modules.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), model, *options]
        path = os.pathsep.join([str(Path(tree).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._column = column
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
            raise SystemExit(
                f"the process of {self._column} ended with code {self._process.wait()}; its error is above"
            )
        found: Figures = json.loads(line)
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def show(model: str, found: dict[str, dict[str, list[float]]]) -> None:
    columns = list(found)
    print(f"  {'':32} " + " ".join(f"{column[-22:]:>22}" for column in columns) + "   ratios to the first")
    for name in found[columns[0]]:
        medians = [statistics.median(found[column][name]) for column in columns]
        cells = [f"{m:>13.5g} ±{spread(found[c][name]) / 2:>6.1%} " for c, m in zip(columns, medians, strict=True)]
        ratios = "  ".join(f"{median / medians[0]:.3f}" for median in medians[1:])
        print(f"  {name:32} " + " ".join(cells) + f"   {ratios}", flush=True)


def spread(values: list[float]) -> float:
    """Return the range of the middle half of some values, relative to their median.

    >>> spread([1.0, 9.0, 10.0, 11.0, 50.0])
    0.2
    """
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / statistics.median(ordered)


# child process: measures ----------------------------------------------------------------------------------------------


def work(arguments: argparse.Namespace) -> int:
    """Load the model of the tree on the path, then measure once for every line of the input."""
    # Libraries print to the standard output; redirect it, so that the pipe carries results only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from benchmarks.gpu import start, warm_up

    # All trees since the first version accept these options by these names.
    options = argparse.Namespace(device=arguments.device, dtype=arguments.dtype, memory=arguments.memory)
    given = dict(change.split("=", 1) for change in arguments.worker.split(",") if change)
    changes: Any = {name: {"true": True, "false": False}.get(value, value) for name, value in given.items()}
    longest = max(24_000, arguments.context, *arguments.lengths) + 1024
    llm = start(arguments.models[0], options, depth=1, max_sequences=256, max_length=longest, **changes)
    if arguments.device == "cuda":
        warm_up(llm, rows=sorted({*arguments.rows, *(() if arguments.no_serving else (32, 128))}))
    # The first round compiles what is left; its result signals that the model is loaded.
    print(json.dumps(measure_once(llm, arguments)), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure_once(llm, arguments)), file=answers, flush=True)
    return 0


def measure_once(llm: Any, arguments: argparse.Namespace) -> Figures:
    from benchmarks.gpu import fresh, random_prompt
    from benchmarks.prefill import first_token, repeated_prompt
    from benchmarks.serving import conversations, shared_prefix

    found: Figures = {}
    for rows in arguments.rows:
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))[: 1 if arguments.greedy else 2]:
            seconds = time_per_token(llm, rows, arguments.answer, temperature, arguments.context)
            found[f"decode {rows} rows {name}, ms"] = seconds * 1e3
    for length in arguments.lengths:
        times = [first_token(fresh(llm), random_prompt(llm, length, length, n)) for n in range(5)]
        found[f"prompt of {length}, ms"] = statistics.median(times) * 1e3
    if not arguments.no_serving:
        again = repeated_prompt(llm, 3)
        found["prompt of 20,000, ms"], found["repeated, ms"] = again["cold_seconds"] * 1e3, again["warm_seconds"] * 1e3
        shared = shared_prefix(llm)
        for name in ("first", "second"):
            found[f"shared prefix {name}, tokens/s"] = shared[name]["tokens_per_second"]
        found["conversations, tokens/s"] = conversations(llm)["tokens_per_second"]
    return found


def time_per_token(llm: Any, rows: int, answer: int, temperature: float, prompt: int = 100) -> float:
    """Return the seconds that each of these rows needs for a token, from the first token of the last row on."""
    from benchmarks.gpu import fresh, random_prompt
    from weft.base.sampling import SamplingParams
    from weft.engine.request import Request

    engine = fresh(llm)
    params = SamplingParams(max_tokens=answer + 16, temperature=temperature, ignore_eos=True, seed=1)
    waiting = {engine.add(Request(random_prompt(llm, prompt, 1000 * rows, n), params)) for n in range(rows)}
    while waiting:
        waiting -= {output.sequence for output in engine.step()}
    began, tokens, all_decode = time.perf_counter(), 0, True
    while all_decode:
        outputs = engine.step()
        tokens += sum(output.token is not None for output in outputs)
        all_decode = all(output.finish is None for output in outputs)
    seconds = time.perf_counter() - began
    while not engine.idle:
        engine.step()
    return seconds * rows / tokens


if __name__ == "__main__":
    sys.exit(main())
