"""Ways to compute the same answers: cold, cached, in chunks, in company, preempted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.support.models.engines import (
    FAMILIES,
    Answer,
    Ask,
    greedy,
    make_engine,
    seeded,
    serve,
    tokens,
)
from weft.engine.events import FinishReason
from weft.engine.loop import Engine

TOLERANCE = 2e-5
STEM = tokens(150, 0)
LONGEST = 230  # of prompt and answer together


@cache
def asks() -> tuple[Ask, ...]:
    """Prompts that share beginnings of several lengths, on and off the grid, one that is another's second turn.

    All answers but the third last's decode past the end of a cell.
    """
    prompts = [
        STEM[:130] + tokens(20, 1),
        STEM[:129] + tokens(70, 2),
        STEM[:70] + tokens(1, 3),
        STEM,
        STEM[:128],
        tokens(1, 4),
        tokens(63, 5),
        STEM + tokens(33, 6),
    ]
    return tuple(
        Ask(prompt, greedy(count) if index % 2 else seeded(count, seed=index), step=index // 2)
        for index, (prompt, count) in enumerate(zip(prompts, [50, 30, 60, 45, 66, 10, 68, 14], strict=True))
    )


@cache
def reference(family: str) -> list[Answer]:
    """Each request alone, in one piece, without a cache."""
    return [
        serve(make_engine(family, cache=False, max_sequences=1, paranoid=False), [replace(ask, step=0)])[0]
        for ask in asks()
    ]


SCENARIOS = {
    "cache off, all together": {"cache": False},
    "cache on": {},
    "chunks of 50, depth 1": {"max_tokens_per_step": 50, "depth": 1},
    "chunks of 8, one by one": {"max_tokens_per_step": 8, "max_sequences": 8},
    "depth 1, longest prefix first": {"depth": 1, "order": "prefix", "capture_every": 64},
}


def check(family: str, requests: list[Ask], answers: list[Answer], order: list[int]) -> None:
    for place, index in enumerate(order):
        expected, answer = reference(family)[index], answers[place]
        if requests[place].abort_after is not None and answer.finish is FinishReason.ABORT:
            expected = replace(expected, tokens=expected.tokens[: len(answer.tokens)])
        assert answer.tokens == expected.tokens, f"request {index}"
        worst = max((abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs)), default=0.0)
        assert worst <= TOLERANCE, f"request {index}: logprobs differ by {worst}"


def scenarios() -> list[object]:
    """Every family under every scenario; without the slow tests three of five each, so that each scenario meets most
    kinds of layers."""
    return [
        pytest.param(family, scenario, marks=[] if (place + number) % 5 < 3 else [pytest.mark.slow])
        for place, family in enumerate(FAMILIES)
        for number, scenario in enumerate(SCENARIOS)
    ]


def check_answers_do_not_depend_on_how_they_are_computed(family: str, scenario: str) -> None:
    engine = make_engine(family, **SCENARIOS[scenario])
    answers = serve(engine, list(asks()))
    check(family, list(asks()), answers, list(range(len(asks()))))
    assert (engine.ledger.cache.counts.tokens_cached > 0) == engine.config.cache


def admit_everything(engine: Engine) -> None:
    """Let requests in that will not fit, so that memory runs out on the way and sequences must give way."""
    engine.ledger.has_room = lambda needed: True
