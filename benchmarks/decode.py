"""Compare decode steps with the minimum time to move their bytes, by batch size, and measure how idle the GPU is.

    python -m benchmarks.decode                         LFM2-1.2B, Nemotron-Nano-9B-v2 and qwen3-next-mini
    python -m benchmarks.decode qwen3.5-9b --quick

Prompts have 128 random tokens; the engine then decodes with one step in flight. The time is the wall-clock time that
every row needs for a token, the mean over 128 tokens, in which every row closes its cell twice; drafts that are right
shorten it. The floor is the bytes that the step must read and write
(weights, of the experts only those chosen by random tokens; checkpoints, tails, KV) divided by the bandwidth of a copy
in the same run.

Idle time is measured at 64 rows: one minus the device time of a step, from the profiler's timeline of 32 steps, over
the wall-clock time of the same step without the profiler. Device time includes gaps of up to 5 µs between kernels. The
idle share of the profiler's own timeline is printed too; it is an upper bound, because the host is slower under the
profiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.columns import COLUMNS
from benchmarks.floors import Sketch
from benchmarks.gpu import (
    Ask,
    Attempts,
    arguments_of,
    fresh,
    keep,
    machine,
    random_prompt,
    run,
    start,
    warm_up,
)
from benchmarks.trees import time_per_token
from weft import LLM
from weft.engine.loop import Engine

BATCHES = (1, 8, 32, 128, 256)
PROMPT = 128
WARM_STEPS = 8
STEPS = 128
IDLE_ROWS = 64
IDLE_STEPS = 32
HOST_GAP_MICROSECONDS = 5.0


def main() -> int:
    return run(arguments_of("decode", __doc__, limit_seconds=240, columns=COLUMNS), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    batches = [rows for rows in BATCHES if rows <= (32 if arguments.quick else 256)]
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "steps": [], "errors": attempts.errors}
    llm = start(model, arguments, depth=1, max_sequences=max(IDLE_ROWS, *batches), max_length=1024)
    # The layout of tails depends on the device.
    sketch = replace(Sketch.of(model), spec=llm.engine.ledger.spec)
    warm_up(llm)
    bandwidth = found["machine"]["copy_bytes_per_second"]
    for rows in batches:
        with attempts.part(f"batch {rows}"):
            tokens = 64 if arguments.quick else STEPS
            seconds, positions = time_per_token(llm, rows, tokens, 0.0, PROMPT), range(PROMPT, PROMPT + tokens)
            floor = sketch.decode_bytes(rows, positions) / bandwidth
            weights = sketch.active_weight_bytes(rows)
            found["steps"].append({"rows": rows, "seconds": seconds, "floor": floor, "weight_bytes": weights})
        keep(found, arguments)
    with attempts.part("idle"):
        found["idle"] = idle_share(llm, IDLE_ROWS, arguments.device)
    return found


def decoding(llm: LLM, rows: int, answer: int, seed: int) -> Engine:
    """Return an engine with `rows` rows that have finished prefill and decode."""
    engine = fresh(llm)
    for number in range(rows):
        engine.add(Ask(random_prompt(llm, PROMPT, seed + number), answer).request())
    while len(engine.planner.queue) or engine.planner.prefilling:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    assert len(engine.planner.decoding) == rows, "not all rows fit: raise --memory"
    return engine


def finish(engine: Engine) -> None:
    for number in list(engine._sequences):
        engine.abort(number)
    while not engine.idle:
        engine.step()


def idle_share(llm: LLM, rows: int, device: str) -> dict[str, float]:
    """Return the idle shares of the GPU over some decode steps, from the profiler's timeline; empty without a GPU."""
    from torch.profiler import ProfilerActivity, profile

    if device != "cuda":
        return {}
    engine = decoding(llm, rows, 3 * IDLE_STEPS + 32, seed=77_000)
    began = time.perf_counter()
    for _ in range(IDLE_STEPS):
        engine.step()
    plain = (time.perf_counter() - began) / IDLE_STEPS
    # Profiling slows the host down, so profile the device only.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(IDLE_STEPS):
            engine.step()
    finish(engine)
    intervals = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA") and event.time_range.end > event.time_range.start
    )
    if not intervals:
        raise RuntimeError("the profiler saw no kernels")
    seen = timeline(intervals)
    # Compare device time with the wall clock of the steps without the profiler, which slows the host down.
    return seen | {
        "step_seconds": plain,
        "idle_without_profiler": max(0.0, 1 - seen["device_seconds_per_step"] / plain),
    }


def timeline(intervals: list[tuple[float, float]]) -> dict[str, float]:
    """Return the idle shares of the time between the first start and the last end; intervals are in microseconds.

    >>> timeline([(0.0, 40.0), (41.0, 90.0), (100.0, 100.0)])
    {'idle': 0.11, 'idle_in_long_gaps': 0.1, 'device_seconds_per_step': 2.8125e-06}
    """
    end = begin = intervals[0][0]
    idle = long = 0.0
    for start_, stop in intervals:
        gap = max(0.0, start_ - end)
        idle += gap
        long += gap if gap > HOST_GAP_MICROSECONDS else 0.0
        end = max(end, stop)
    whole = end - begin
    device = (whole - long) / IDLE_STEPS / 1e6
    return {"idle": idle / whole, "idle_in_long_gaps": long / whole, "device_seconds_per_step": device}


def show(model: str, found: dict[str, Any]) -> None:
    bandwidth = found["machine"]["copy_bytes_per_second"]
    print(f"  {found['machine']['device']}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"  {'rows':>6} {'step ms':>9} {'floor ms':>9} {'÷ floor':>8} {'tokens/s':>9}")
    for step in found["steps"]:
        rows, seconds, floor = step["rows"], step["seconds"], step["floor"]
        print(f"  {rows:>6} {seconds * 1e3:>9.3f} {floor * 1e3:>9.3f} {seconds / floor:>8.2f} {rows / seconds:>9.0f}")
    idle = found.get("idle")
    if idle:
        whole, gaps = idle["idle"], idle["idle_in_long_gaps"]
        profiled = f"under the profiler {whole:.1%}, {gaps:.1%} in gaps over 5 µs"
        print(f"  idle at {IDLE_ROWS} rows: {idle['idle_without_profiler']:.1%} between steps ({profiled})")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
