"""Measure gaps between the tokens of running streams, and what bounding them with `--max-step-ms` costs.

    python -m benchmarks.paced                          Nemotron-Nano-9B-v2
    python -m benchmarks.paced lfm2-1.2b --quick

256 streams of 512 tokens in and 256 out are open at all times: as soon as one is answered, another begins. A quarter of
the first ones have short answers, so that prompts arrive throughout. A gap is the time between two tokens of one
stream; a rate is the tokens of all answers over the time that they took. Bounds alternate with none.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from statistics import median
from typing import Any

from benchmarks.gpu import Ask, Attempts, arguments_of, fresh, keep, machine, random_prompt, run, start, warm_up
from weft import LLM
from weft.base.options import step_bound
from weft.engine.loop import Engine

STREAMS, PROMPT, ANSWER = 256, 512, 256
ROUNDS = 3  # streams one after the other in each place
BOUNDS = ("off", "auto", 60.0, 40.0)


def main() -> int:
    return run(arguments_of("paced", __doc__, limit_seconds=420, models=("nemotron-nano-9b-v2",)), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "errors": attempts.errors, "bounds": {}}
    llm = start(model, arguments, max_sequences=STREAMS, max_length=1024)
    warm_up(llm, rows=(1, 64, STREAMS))
    for bound in BOUNDS[:2] if arguments.quick else BOUNDS:
        with attempts.part(f"bound {bound}"):
            rounds = [streams(llm, bound, number) for number in range(1 if arguments.quick else 2)]
            found["bounds"][str(bound)] = {name: median(each[name] for each in rounds) for name in rounds[0]}
        keep(found, arguments)
    return found


def streams(llm: LLM, bound: str | float, number: int) -> dict[str, float]:
    """Return the rate of all streams, and quantiles of their gaps in milliseconds."""
    step_ms, decodes = step_bound(bound)
    engine = fresh(llm, max_step_ms=step_ms, max_step_decodes=decodes, cache=False)
    left = STREAMS * (ROUNDS - 1)
    for place in range(STREAMS):
        answer = ANSWER * (1 + place % 4) // 4
        engine.add(Ask(random_prompt(llm, PROMPT, number, place), answer).request())
    gaps, tokens, began = [], 0, time.perf_counter()
    last: dict[int, float] = {}
    while not engine.idle:
        arrived = step(engine)
        now = time.perf_counter()
        for sequence, (count, ended) in arrived.items():
            tokens += count
            if sequence in last and count:
                gaps.append(now - last[sequence])
            last[sequence] = now
            if ended:
                engine.forget(sequence)
                del last[sequence]
                if left:
                    engine.add(Ask(random_prompt(llm, PROMPT, number, STREAMS + left), ANSWER).request())
                    left -= 1
    seconds = time.perf_counter() - began
    gaps.sort()
    shares = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    quantiles = {name: 1e3 * gaps[int(share * (len(gaps) - 1))] for name, share in shares.items()}
    return {"tokens/s": tokens / seconds, "shortened": engine.planner.pacing.shortened} | quantiles


def step(engine: Engine) -> dict[int, tuple[int, bool]]:
    """Return for each sequence how many tokens came, and whether it has ended."""
    found: dict[int, tuple[int, bool]] = defaultdict(lambda: (0, False))
    for output in engine.step():
        count, ended = found[output.sequence]
        found[output.sequence] = (count + (output.token is not None), ended or output.finish is not None)
    return found


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}")
    print(f"  {'bound, ms':>9} {'tokens/s':>9} {'÷ off':>6} {'p50':>7} {'p99':>7} {'worst':>7}  gaps in ms")
    for bound, each in found["bounds"].items():
        share = each["tokens/s"] / found["bounds"]["off"]["tokens/s"]
        times = " ".join(f"{each[name]:>7.1f}" for name in ("p50", "p99", "worst"))
        print(f"  {bound:>9} {each['tokens/s']:>9.0f} {share:>6.3f} {times}  {each['shortened']:.0f} steps shortened")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
