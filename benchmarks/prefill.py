"""Measure the time to the first token by prompt length, the cost of snapshots and the savings of a repeated prompt.

    python -m benchmarks.prefill                        LFM2-1.2B, Nemotron-Nano-9B-v2 and qwen3-next-mini
    python -m benchmarks.prefill qwen3.5-9b --quick

Requests run one at a time through the engine, with random tokens; figures are medians. The share of the matmul rate
counts the matmuls with weights and those of attention, not recurrent scans, relative to the best large bfloat16 matmul
of the same run. Snapshots are taken at the prompt's end, at a junction and every 2,048 tokens, and compared with a run
that keeps only the sequence's own state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import numpy as np

from benchmarks.columns import COLUMNS
from benchmarks.floors import Sketch
from benchmarks.gpu import (
    Ask,
    Attempts,
    arguments_of,
    fresh,
    keep,
    machine,
    play,
    random_prompt,
    run,
    start,
    warm_up,
)
from weft import LLM
from weft.engine.loop import Engine

LENGTHS = (512, 8192, 32768)
# Neither this nor the junction is a multiple of 2,048, so each adds a snapshot.
CAPTURED = 8300
JUNCTION = 4160
EVERY = 2048
REPEATED = 20_000
TAIL = 64
LONGEST = 34_000


def main() -> int:
    return run(arguments_of("prefill", __doc__, limit_seconds=240, columns=COLUMNS), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    lengths = LENGTHS[:2] if arguments.quick else LENGTHS
    repeats = 2 if arguments.quick else 5
    sketch, attempts = Sketch.of(model), Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "prompts": [], "errors": attempts.errors}
    llm = start(model, arguments, depth=1, max_sequences=64, max_length=LONGEST, capture_every=EVERY)
    warm_up(llm, rows=(1,), lengths=(512, 8300))
    rate = found["machine"]["matrix_operations_per_second"]
    for length in lengths:
        with attempts.part(f"{length} tokens"):
            seconds = statistics.median(
                first_token(fresh(llm), random_prompt(llm, length, length, n)) for n in range(repeats)
            )
            share = sketch.prefill_operations(length) / seconds / rate
            found["prompts"].append({"tokens": length, "seconds": seconds, "share_of_matrix_rate": share})
        keep(found, arguments)
    with attempts.part("captures"):
        found["captures"] = cost_of_captures(llm, 3 if arguments.quick else 9)
    keep(found, arguments)
    with attempts.part("repeated prompt"):
        found["repeated"] = repeated_prompt(llm, 1 if arguments.quick else 7)
    return found


def first_token(engine: Engine, prompt: np.ndarray, snapshots: tuple[int, ...] = ()) -> float:
    ask = Ask(prompt, 1, snapshots)
    play(engine, [ask])
    return ask.first_token_seconds


def cost_of_captures(llm: LLM, repeats: int) -> dict[str, float]:
    """Alternate prefill with and without snapshots, each on an engine that has answered another prompt before."""
    taken: dict[str, list[float]] = {"none": [], "kept": []}
    states = 0
    for number in range(repeats):
        before, prompt = (random_prompt(llm, CAPTURED, seed, number) for seed in (4, 1))
        forgetting = fresh(llm, cache=False)
        first_token(forgetting, before)
        taken["none"].append(first_token(forgetting, prompt))
        keeping = fresh(llm)
        first_token(keeping, before, (JUNCTION,))
        counts = keeping.ledger.cache.counts
        kept_before = counts.captures_kept
        taken["kept"].append(first_token(keeping, prompt, (JUNCTION,)))
        states = counts.captures_kept - kept_before
    none, kept = (statistics.median(taken[name]) for name in ("none", "kept"))
    return {"none_seconds": none, "kept_seconds": kept, "cost": kept / none - 1, "snapshots": states}


def repeated_prompt(llm: LLM, repeats: int) -> dict[str, float]:
    """Run a long prompt twice, the second time with more tokens at its end."""
    cold, warm, cached = [], [], 0
    for number in range(repeats):
        engine, prompt = fresh(llm), random_prompt(llm, REPEATED, 2, number)
        cold.append(first_token(engine, prompt))
        again = Ask(np.concatenate([prompt, random_prompt(llm, TAIL, 3, number)]), 1)
        play(engine, [again])
        warm.append(again.first_token_seconds)
        cached = again.cached_tokens
    cold_seconds, warm_seconds = statistics.median(cold), statistics.median(warm)
    share = warm_seconds / cold_seconds
    return {"cold_seconds": cold_seconds, "warm_seconds": warm_seconds, "share": share, "cached_tokens": cached}


def show(model: str, found: dict[str, Any]) -> None:
    rate = found["machine"]["matrix_operations_per_second"]
    print(f"  {found['machine']['device']}, bfloat16 matmuls {rate / 1e12:.0f} TFLOP/s")
    print(f"  {'tokens':>7} {'ms':>9} {'of the matmul rate':>20}")
    for prompt in found["prompts"]:
        print(f"  {prompt['tokens']:>7} {prompt['seconds'] * 1e3:>9.1f} {prompt['share_of_matrix_rate']:>20.0%}")
    if "captures" in found:
        cost = found["captures"]
        none, kept = cost["none_seconds"] * 1e3, cost["kept_seconds"] * 1e3
        more = f"with {cost['snapshots']} snapshots {kept:.1f} ms ({cost['cost']:+.1%})"
        print(f"  {CAPTURED} tokens: {none:.1f} ms, {more}")
    if "repeated" in found:
        again = found["repeated"]
        cold, warm = again["cold_seconds"] * 1e3, again["warm_seconds"] * 1e3
        print(f"  {REPEATED} tokens: cold {cold:.1f} ms, again {warm:.1f} ms ({again['share']:.1%})")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
