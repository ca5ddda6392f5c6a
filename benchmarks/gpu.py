"""Shared code of the GPU benchmarks: options, one process per model, the engine, reports.

Each model is measured in a separate process, which frees all memory when it ends. A model that fails or exceeds its
time limit is reported in one line, and the others still run. What such a process prints is shown at once. Weights are
random; models come from packaged configurations or any config.json.

What is measured first is what a user gets without any option; `--columns default draft=off` adds another column.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.columns import DEFAULT, options_of
from benchmarks.floors import copy_bandwidth, matrix_rate
from weft import LLM
from weft.base.garbage_collection import freeze_heap
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.models import configurations

RESULTS = Path(__file__).parent / "results"
MODELS = ("lfm2-1.2b", "nemotron-nano-9b-v2", "qwen3-next-mini")
# Lower token ids are special tokens in most vocabularies.
FIRST_TOKEN = 1000
# Time from a process's start until its own clock starts.
STARTING_SECONDS = 10


Measure = Callable[[str, argparse.Namespace], dict[str, Any]]
Show = Callable[[str, dict[str, Any]], None]


# running a benchmark ------------------------------------------------------------------------------------------------


def arguments_of(
    program: str,
    about: str,
    limit_seconds: int,
    models: Sequence[str] = MODELS,
    rows: Sequence[int] = (),
    parts: Sequence[str] = (),
    columns: Sequence[str] = (DEFAULT,),
) -> argparse.Namespace:
    """Return the options of a program; with `rows`, their number can be chosen, and so can `parts`, by name.

    `columns` are options of `weft.LLM` that every model is measured with, one set after the other.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=about.splitlines()[0])
    known = ", ".join(configurations.names())
    parser.add_argument("models", nargs="*", default=list(models), help=f"config.json, folder, or one of {known}")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--json", type=Path, help="file for the results; default: a new file in benchmarks/results/")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", default="auto", help="memory for pages and states, such as 40GiB")
    parser.add_argument("--limit", type=int, default=limit_seconds, help="time limit per model in seconds")
    about_columns = "options to measure with, such as draft=off,exact=false; default: those of a user who sets none"
    parser.add_argument("--columns", nargs="+", default=list(columns), help=about_columns)
    if rows:
        parser.add_argument("--rows", type=int, nargs="+", default=list(rows), help="sizes of batches")
    if parts:
        about_parts = "what is measured, in this order; default: all"
        parser.add_argument("--only", nargs="+", default=list(parts), choices=parts, help=about_parts)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.program = program
    arguments.deadline = time.perf_counter() + arguments.limit - STARTING_SECONDS
    return arguments


def keep(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the results so far, so that they survive a time-out of the rest."""
    if arguments.here:
        arguments.here.write_text(json.dumps(found))


def run(arguments: argparse.Namespace, measure: Measure, show: Show) -> int:
    """Measure every model in a separate process and print the results; return the number of models that failed.

    The child process is the same program with `--here FILE`: it measures one model and writes the results to the file.
    """
    if arguments.here:
        keep(measure(arguments.models[0], arguments), arguments)
        return 0
    # Turn SIGTERM into an exception, so that the child process is killed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    report: dict[str, Any] = {"program": arguments.program, "when": time.strftime("%Y-%m-%d %H:%M:%S"), "models": {}}
    report["command"] = " ".join(["python -m", f"benchmarks.{arguments.program}", *sys.argv[1:]])
    failed = 0
    for model, column in ((model, column) for model in arguments.models for column in arguments.columns):
        begun = time.perf_counter()
        found = _run_separately(model, column, arguments)
        seconds = time.perf_counter() - begun
        name = model if column == DEFAULT else f"{model} with {column}"
        report["models"][name] = found
        print(f"\n{name}  ({seconds:.0f} s)", flush=True)
        if "error" in found:
            failed += 1
            print(f"  failed: {found['error']}", flush=True)
        if "machine" in found:
            show(model, found)
        save(report, arguments)
    return failed


def _run_separately(model: str, column: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target, log = Path(folder) / "figures.json", Path(folder) / "log"
        options = ["--device", arguments.device, "--dtype", arguments.dtype, "--memory", arguments.memory]
        options += ["--limit", str(arguments.limit), "--columns", column, *(["--quick"] if arguments.quick else [])]
        if "rows" in arguments:
            options += ["--rows", *map(str, arguments.rows)]
        if "only" in arguments:
            options += ["--only", *arguments.only]
        command = [sys.executable, "-m", f"benchmarks.{arguments.program}", model, "--here", str(target), *options]
        with log.open("w") as sink:
            reason = _wait(subprocess.Popen(command, stderr=sink), arguments.limit)
        found = json.loads(target.read_text()) if target.exists() else {}
        if reason is None and found:
            return found
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {lines[-1][:300]}" if lines else ""
        return found | {"error": (reason or "it ended without results") + last, "log": lines[-20:]}


def _wait(process: subprocess.Popen[bytes], seconds: int) -> str | None:
    """Wait for the process and kill it at the time limit. Return why it failed, or None."""
    try:
        code = process.wait(seconds)
        return f"it ended with code {code}" if code else None
    except subprocess.TimeoutExpired:
        return f"it took longer than {seconds} s"
    finally:
        process.kill()
        process.wait()


def save(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the report. Called after every model, so that an interrupted run keeps its results."""
    RESULTS.mkdir(exist_ok=True)
    arguments.json = arguments.json or RESULTS / f"{report['program']}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    arguments.json.write_text(json.dumps(report, indent=1))
    if len(report["models"]) == len(arguments.models) * len(arguments.columns):
        print(f"\nsaved to {arguments.json}")


def machine(device: str) -> dict[str, Any]:
    """Describe the device and its measured rates."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {
        "device": name,
        "torch": torch.__version__,
        "copy_bytes_per_second": copy_bandwidth(device),
        "matrix_operations_per_second": matrix_rate(device),
    }


class Attempts:
    """Parts of a measurement that may fail separately: `with attempts.part("512"): ...` records errors."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self._name = ""

    def part(self, name: str) -> Attempts:
        self._name = name
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.errors[self._name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return True


# engines ------------------------------------------------------------------------------------------------------------


def start(model: str, arguments: argparse.Namespace, **options: Any) -> LLM:
    """Load the model through `weft.LLM` with its defaults, changed by the column's options and by `options`."""
    given = {"weights": "dummy", "device": arguments.device, "dtype": arguments.dtype, "memory": arguments.memory}
    given |= options_of(arguments.columns[0] if "columns" in arguments else DEFAULT)
    llm = LLM(model, progress=False, **given | options)
    if arguments.device == "cuda" and llm.engine._device.recorded is None:
        raise RuntimeError("the GPU kernels must be available; the log above says why they are not")
    # The engine process of a server does the same.
    freeze_heap()
    return llm


def fresh(llm: LLM, **changes: Any) -> Engine:
    """Return a new engine with an empty cache on the same device memory; do not use the old one after this."""
    before = llm.engine
    config, drafter = replace(before.config, **changes), before.planner.drafts.model
    if drafter is not None:
        drafter.flush()
    drafts = drafter if config.draft == before.config.draft else None
    return Engine(before.ledger.spec, before._device, config, draft_model=drafts)


def random_prompt(llm: LLM, length: int, *seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed)
    return drawn.integers(min(FIRST_TOKEN, llm.vocab_size // 2), llm.vocab_size, length).astype(np.int32)


@dataclass(slots=True)
class Ask:
    """A request with an answer of fixed length, and its results."""

    prompt: np.ndarray
    answer_tokens: int
    snapshots: tuple[int, ...] = ()
    tokens: list[int] | None = None
    cached_tokens: int = 0
    first_token_seconds: float = 0.0

    def request(self) -> Request:
        greedy = SamplingParams(max_tokens=self.answer_tokens, temperature=0.0, ignore_eos=True)
        return Request(self.prompt, greedy, snapshots=self.snapshots)


def begin(engine: Engine, requests: Sequence[Request]) -> None:
    """Add requests and run the engine until the first token of each has landed: no prompt is in flight any more."""
    waiting = {engine.add(request) for request in requests}
    while waiting:
        waiting -= {output.sequence for output in engine.step()}


def rate_of(engine: Engine, requests: Sequence[Request]) -> float:
    """Return tokens per second while all of these requests decode."""
    begin(engine, requests)
    began, tokens, all_decode = time.perf_counter(), 0, True
    while all_decode:
        outputs = engine.step()
        tokens += sum(output.token is not None for output in outputs)
        all_decode = all(output.finish is None for output in outputs)
    seconds = time.perf_counter() - began
    while not engine.idle:
        engine.step()
    return tokens / seconds


def play(engine: Engine, asks: list[Ask], follow: Callable[[Ask], Ask | None] = lambda ask: None) -> float:
    """Run all requests and return the seconds it took. `follow` returns the request that follows a finished one."""
    open_asks: dict[int, Ask] = {}
    began = time.perf_counter()

    def add(ask: Ask) -> None:
        ask.tokens = []
        open_asks[engine.add(ask.request())] = ask

    for ask in asks:
        add(ask)
    while open_asks:
        for output in engine.step():
            ask = open_asks[output.sequence]
            assert ask.tokens is not None
            if output.token is not None:
                if not ask.tokens:
                    ask.first_token_seconds = time.perf_counter() - began
                ask.tokens.append(output.token)
            if output.finish is not None:
                assert output.error is None, output.error
                ask.cached_tokens = engine.report(output.sequence).cached_tokens
                engine.forget(output.sequence)
                del open_asks[output.sequence]
                following = follow(ask)
                if following is not None:
                    add(following)
    seconds = time.perf_counter() - began
    while not engine.idle:
        engine.step()
    return seconds


@contextmanager
def without_flashinfer() -> Iterator[None]:
    """Let models that start inside attend with Weft's own kernels: FlashInfer's take a minute to compile."""
    from weft.kernels.cuda.attention import flashinfer

    with patch.object(flashinfer, "warm"):
        yield


def warm_up(llm: LLM, rows: Sequence[int] = (1, 8), lengths: Sequence[int] = (100, 700, 2500)) -> None:
    """Compile kernels and capture graphs that are created on first use, so that no measurement includes that."""
    if torch.cuda.is_available():
        from weft.kernels.cuda.attention import flashinfer

        flashinfer.finish_compiling()
    engine = fresh(llm)
    for round_, length in enumerate(lengths):
        if length + 8 <= engine.config.max_length:
            prompt = random_prompt(llm, length, 10_000 + round_)
            play(engine, [Ask(prompt, 4)])
            tail = random_prompt(llm, 90, 20_000 + round_)
            if length + 100 <= engine.config.max_length:
                play(engine, [Ask(np.concatenate([prompt, tail]), 4)])
    for count in rows:
        play(engine, [Ask(random_prompt(llm, 70 + n, 30_000 + n), 6) for n in range(count)])
