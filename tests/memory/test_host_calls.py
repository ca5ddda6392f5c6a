"""The host's work per request does not grow with what is cached: counted in calls of functions, never by a clock."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

from benchmarks.columns import COLUMNS, DEFAULT, options_of
from benchmarks.host import AMPLE, ANSWER, SYSTEM, SYSTEMS, engine_with, fill, play, questions
from benchmarks.planner import SPEC, prompt
from weft.memory.valuation import Valuation


def calls_per_request(column: str, points: int, full: bool) -> float:
    """Return the calls of a request behind a shared prompt, with this number of resume points in the cache."""
    random = np.random.default_rng(points)
    memory = points * (SPEC.state_bytes + 3 * SPEC.page_bytes) if full else AMPLE
    # How often drafts are tried depends on how long steps take: here they are short.
    engine = engine_with(column, memory, partial(next, itertools.count(0.0, 1e-5)))
    fill(engine, sys.maxsize if full else points, random)
    systems = [prompt(random, SYSTEM) for _ in range(SYSTEMS)]
    play(engine, questions(random, systems), ANSWER)
    asked, calls = questions(random, systems), 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        play(engine, asked, ANSWER)
    finally:
        sys.setprofile(None)
    return calls / len(asked)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("column", ["default", "draft=off"])
def test_a_request_takes_as_many_calls_however_much_is_cached(column: str, full: bool) -> None:
    few, many = (calls_per_request(column, points, full) for points in (300, 1500))
    # Where memory is full, what is evicted depends on what there is.
    assert many < 1.1 * few


def test_while_memory_is_free_only_points_that_a_request_uses_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    offered, offer = 0, Valuation.offer

    def counted(valuation: Valuation, candidate: Any) -> None:
        nonlocal offered
        offered += 1
        offer(valuation, candidate)

    random = np.random.default_rng(1)
    engine = engine_with("draft=off", AMPLE)
    fill(engine, 600, random)
    systems = [prompt(random, SYSTEM) for _ in range(SYSTEMS)]
    monkeypatch.setattr(Valuation, "offer", counted)
    play(engine, asked := questions(random, systems), 8)
    assert offered < 8 * len(asked)


def test_the_first_column_of_a_benchmark_is_what_a_user_gets_without_options() -> None:
    assert (COLUMNS[0], options_of(COLUMNS[0])) == (DEFAULT, {})
    assert engine_with(DEFAULT, AMPLE).planner.drafting is not None
    assert options_of("draft=off") == {"draft": "off"}
    assert engine_with("draft=off", AMPLE).planner.drafting is None


def test_drafts_that_find_nothing_add_few_calls_to_a_request() -> None:
    assert calls_per_request("default", 300, False) < 1.1 * calls_per_request("draft=off", 300, False)
