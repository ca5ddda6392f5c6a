"""Measure the host's time per request by the number of resume points in the cache, without a device.

    python -m benchmarks.host
    python -m benchmarks.host --points 1000 100000 --columns default draft=off

The device is a fake that returns at once, so all measured time is Weft's own work: 128 requests that share eight
prompts of 2,048 tokens, with other questions of 128 tokens and answers of 128. Prints milliseconds of processor time
per request, the median of several rounds: with free memory, and with a cache that is full, so that every new state
evicts another one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.columns import COLUMNS, options_of
from benchmarks.planner import SPEC, prompt
from weft.base.config import EngineConfig
from weft.base.garbage_collection import freeze_heap
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.engine.device import Device
from weft.engine.loop import Engine
from weft.engine.request import Request

SYSTEMS, QUESTIONS = 8, 16
SYSTEM, QUESTION, ANSWER = 2048, 128, 128
VOCABULARY = 60_000
DRAFTS = 7
# Memory that is never full.
AMPLE = 1 << 40


class RandomDevice(Device):
    """Device that returns random tokens at once: nothing that follows a text, so no draft is right."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)

    def launch(self, plan: Plan) -> int:
        return plan.sample_count

    def land(self, flight: int) -> Landing:
        return Landing(self._random.integers(0, VOCABULARY, flight).astype(np.int32), None, None)


def engine_with(column: str, memory_bytes: int, now: Callable[[], float] = time.perf_counter) -> Engine:
    """Return an engine as a user gets it on a GPU without an MTP head: with drafts from texts, unless they are off."""
    draft = options_of(column).get("draft", "suffix")
    drafts = 0 if draft == "off" else DRAFTS
    config = EngineConfig(
        memory_bytes=memory_bytes,
        max_sequences=256,
        max_tokens_per_step=8192,
        max_length=4096,
        depth=1,
        draft=draft,
        draft_tokens=drafts,
    )
    return Engine(replace(SPEC, draft_room=drafts), RandomDevice(), config, now=now)


def play(engine: Engine, prompts: list[np.ndarray], answer: int) -> float:
    """Run requests to their end and return the seconds of processor time."""
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    began = time.process_time()
    numbers = [engine.add(Request(each, params)) for each in prompts]
    while not engine.idle:
        engine.step()
    seconds = time.process_time() - began
    for number in numbers:
        engine.forget(number)
    return seconds


def fill(engine: Engine, points: int, random: np.random.Generator) -> None:
    """Run short requests until the cache has this number of resume points, or memory is full."""
    while engine.ledger.cache.points < points and not engine.ledger.cache.counts.evicted_points:
        play(engine, [prompt(random, 200) for _ in range(256)], 1)


def questions(random: np.random.Generator, systems: list[np.ndarray]) -> list[np.ndarray]:
    return [np.concatenate([each, prompt(random, QUESTION)]) for each in systems for _ in range(QUESTIONS)]


def measure(points: int, column: str, rounds: int, full: bool) -> float:
    """Return the milliseconds of a request with this number of points in the cache."""
    random = np.random.default_rng(points)
    # A state and two pages are all that most of these points hold.
    memory = points * (SPEC.state_bytes + 3 * SPEC.page_bytes) if full else AMPLE
    engine = engine_with(column, memory)
    fill(engine, points, random)
    if full:
        fill(engine, sys.maxsize, random)
    systems = [prompt(random, SYSTEM) for _ in range(SYSTEMS)]
    play(engine, questions(random, systems), ANSWER)
    freeze_heap()
    taken = [play(engine, questions(random, systems), ANSWER) for _ in range(rounds)]
    return statistics.median(taken) / (SYSTEMS * QUESTIONS) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, nargs="+", default=[1_000, 100_000], help="resume points in the cache")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), help="what is measured: default, draft=off")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{'points':>8} {'options':>12} {'memory free, ms':>16} {'memory full, ms':>16}")
    for points in arguments.points:
        for column in arguments.columns:
            free, full = (measure(points, column, arguments.rounds, each) for each in (False, True))
            print(f"{points:>8} {column:>12} {free:>16.3f} {full:>16.3f}", flush=True)


if __name__ == "__main__":
    main()
