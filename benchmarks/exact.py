"""Measure what exact answers cost: steps of exact operations against the usual ones, on the same weights and memory.

    python -m benchmarks.exact                          five models
    python -m benchmarks.exact lfm2-1.2b --quick

Decode steps are recorded once by either package and replayed in turns, at 1, 32 and 128 rows of 1,000 tokens; every
row has states and pages of its own. Prompts of 8,192 tokens run eagerly, in turns too. Figures are medians of device
times. The usual operations use FlashInfer for prompts where it is installed; its modules compile first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import Attempts, arguments_of, keep, machine, run
from weft.base.plan import Plan
from weft.device.store import Store
from weft.kernels.choosing import choose
from weft.kernels.interface import Operations
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.models.config import read_config, text_part
from weft.models.finding import find_checkpoint
from weft.models.model import CausalModel
from weft.models.weights import load_model
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.padding import trial
from weft.runner.cuda.recorded import Boards, RecordedSteps, warm_mixers
from weft.runner.runner import Runner

MODELS = ("lfm2-1.2b", "nemotron-nano-9b-v2", "qwen3.5-9b", "qwen3-next-mini", "gpt-oss-20b")
ROWS = (1, 32, 128)
CONTEXT = 1000
PROMPT = 8192
REPEATS = 15
# Goals: the most that may be lost, of a step of one row and of any other.
GOALS = {1: 0.15}
GOAL = 0.10

Timed = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Compared:
    """A model, and both packages that may compute it. Their memory has the same layout."""

    model: CausalModel
    spec: MemorySpec
    packages: dict[str, Operations]


def main() -> int:
    return run(arguments_of("exact", __doc__, limit_seconds=240, models=MODELS), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    compared = prepare(model, getattr(torch, arguments.dtype))
    return measure_prepared(compared, arguments)


def measure_prepared(compared: Compared, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine("cuda"), "steps": [], "errors": attempts.errors}
    for rows in ROWS[:2] if arguments.quick else ROWS:
        with attempts.part(f"{rows} rows"):
            found["steps"].append({"rows": rows, "seconds": decode_seconds(compared, rows)})
        keep(found, arguments)
    with attempts.part(f"{PROMPT} tokens"):
        found["prompt"] = prefill_seconds(compared, 3 if arguments.quick else 5)
    return found


def prepare(name: str, dtype: torch.dtype) -> Compared:
    """Load random weights and compile what will be measured, in parallel."""
    model = load_model(find_checkpoint(name, False), dtype, "cuda", weights="dummy", progress=False)[0]
    packages = {
        name: choose("cuda", dtype, model.memories, exact=name == "exact").operations for name in ("usual", "exact")
    }
    spec = MemorySpec(model.memories(packages["usual"]))
    assert spec == MemorySpec(model.memories(packages["exact"]))
    for operations in packages.values():
        warm_mixers(model, operations)
    compared = Compared(model, spec, packages)
    compile_both(compared)
    return compared


@torch.inference_mode()
def compile_both(compared: Compared) -> None:
    from weft.kernels.cuda.attention import flashinfer
    from weft.kernels.cuda.launch.ahead import compiling_ahead

    flashinfer.finish_compiling()
    store = Store(compared.spec, 1 << 20, "cuda", scratch=True)
    with compiling_ahead():
        for operations in compared.packages.values():
            for rows in ROWS:
                steps = recorded_steps(compared, operations, store, rows)
                steps._decode(rows)
            runner = prompt_runner(compared, operations, store)
            runner.run(trial(np.zeros(1, np.int32), np.full(1, PROMPT, np.int32), compared.spec, store.scratch))


def units_of(spec: MemorySpec, rows: int, cells: int) -> tuple[dict[Kind, np.ndarray], int]:
    """Return the indices of units that `rows` rows of `cells` cells own, by kind, and the bytes of all of them."""
    counts = {Kind.PAGE: cells, Kind.WINDOW: cells, Kind.STATE: 1, Kind.TAIL: 1}
    found, used = {}, 0
    for kind, size in unit_bytes(spec).items():
        first = -(-used // size)
        found[kind] = (first + np.arange(rows * counts[kind], dtype=np.int32)).reshape(rows, counts[kind])
        used = (first + rows * counts[kind]) * size
    return found, used


def random_tokens(model: CausalModel, count: int) -> np.ndarray:
    """Return different tokens, which choose different experts."""
    return np.random.default_rng(0).integers(0, model.vocab_size, count).astype(np.int32)


def decode_plan(compared: Compared, units: dict[Kind, np.ndarray], rows: int) -> Plan:
    """Return a step of decodes, each row with units of its own."""
    spec = compared.spec
    starts = np.full(rows, CONTEXT, np.int32)
    plan = trial(starts, starts + 1, spec, {})
    seats = np.arange(rows, dtype=np.int32)
    first = 0 if spec.window is None else max(0, CONTEXT - spec.window + 1) // spec.cell
    given: dict[str, Any] = {"seat": seats, "window_first": np.full(rows, first, np.int32)}
    given["tokens"] = random_tokens(compared.model, rows)
    for kind, name in ((Kind.PAGE, "page_table"), (Kind.WINDOW, "window_table")):
        if kind in units:
            given[name] = units[kind][:, first if kind is Kind.WINDOW else 0 :]
    for kind, name in ((Kind.STATE, "read_slot"), (Kind.TAIL, "tail")):
        if kind in units:
            given[name] = units[kind][:, 0]
    return replace(plan, **given)


def recorded_steps(compared: Compared, operations: Operations, store: Store, rows: int) -> RecordedSteps:
    cells = -(-(CONTEXT + 1) // compared.spec.cell)
    inputs = DecodeInputs(rows, cells, compared.spec, store.scratch, "cuda", operations)
    board = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    # Decodes have no drafts.
    return RecordedSteps(compared.model, store.views, Boards(board, board, board), inputs, [])


@torch.inference_mode()
def decode_seconds(compared: Compared, rows: int) -> dict[str, float]:
    units, size = units_of(compared.spec, rows, -(-(CONTEXT + 1) // compared.spec.cell))
    store = Store(compared.spec, size, "cuda", scratch=True)
    plan = decode_plan(compared, units, rows)
    replays: dict[str, Timed] = {}
    for name, operations in compared.packages.items():
        steps = recorded_steps(compared, operations, store, rows)
        steps.decodes.fill(plan, rows)
        steps._decode(rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps._decode(rows)
        # The graph reads and writes their memory.
        replays[name] = lambda graph=graph, steps=steps: graph.replay()  # type: ignore[misc]
    return alternate(replays, REPEATS, calls=8)


def prompt_runner(compared: Compared, operations: Operations, store: Store) -> Runner:
    runner = Runner(compared.model, compared.spec, 64, 4, "cuda", operations=operations)
    runner.eager.placed = runner.placed = replace(runner.placed, store=store)
    return runner


@torch.inference_mode()
def prefill_seconds(compared: Compared, repeats: int) -> dict[str, float]:
    units, size = units_of(compared.spec, 1, PROMPT // compared.spec.cell)
    store = Store(compared.spec, size, "cuda", scratch=True)
    plan = trial(np.zeros(1, np.int32), np.full(1, PROMPT, np.int32), compared.spec, {})
    given = {Kind.PAGE: "page_table", Kind.WINDOW: "window_table"}
    tables = {name: units[kind] for kind, name in given.items() if kind in units}
    plan = replace(plan, tokens=random_tokens(compared.model, PROMPT), **tables)
    runners = {name: prompt_runner(compared, each, store) for name, each in compared.packages.items()}
    return alternate({name: lambda runner=runner: runner.run(plan) for name, runner in runners.items()}, repeats, 1)  # type: ignore[misc]


def alternate(timed: dict[str, Timed], repeats: int, calls: int) -> dict[str, float]:
    """Return the median seconds of each call on the device, measured in turns."""
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats + 1):
        for name, call in timed.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(begin.elapsed_time(end) / 1e3 / calls)
    # The first round warms up.
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}\n  {'':>14} {'usual ms':>9} {'exact ms':>9} {'cost':>7}")
    lines = [(f"{step['rows']} rows", GOALS.get(step["rows"], GOAL), step["seconds"]) for step in found["steps"]]
    if "prompt" in found:
        lines.append((f"{PROMPT} tokens", GOAL, found["prompt"]))
    for label, goal, seconds in lines:
        cost = seconds["exact"] / seconds["usual"] - 1
        missed = f"  more than {goal:.0%}" if cost > goal else ""
        print(f"  {label:>14} {seconds['usual'] * 1e3:>9.3f} {seconds['exact'] * 1e3:>9.3f} {cost:>+7.1%}{missed}")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")
    print(f"  for weft/start/exact_costs.py:\n    {table_line(model, found)}")


def table_line(model: str, found: dict[str, Any]) -> str:
    """Return the model's line of the table that `--exact auto` reads. What was not measured is None."""
    place = find_checkpoint(model, False)
    family = text_part(read_config(place if place.is_file() else place / "config.json"))["model_type"]
    steps = {step["rows"]: step["seconds"] for step in found["steps"]}
    measured = [*(steps.get(rows) for rows in ROWS), found.get("prompt")]
    costs = [None if each is None else round(each["exact"] / each["usual"] - 1, 3) for each in measured]
    when = time.strftime("%Y-%m-%d")
    return f'("{found["machine"]["device"]}", "{family}"): Cost("{model}", "{when}", {", ".join(map(str, costs))}),'


if __name__ == "__main__":
    sys.exit(main())
