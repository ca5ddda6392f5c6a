"""Forks of an answer: what each computes, and that it goes on as the answer did. For engines of any model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.support.models.engines import VOCABULARY
from weft.base.sampling import SamplingParams
from weft.engine.events import Report
from weft.engine.loop import Engine
from weft.engine.request import Request

FORKS = 64


def run(engine: Engine, requests: list[Request]) -> list[tuple[list[tuple[int, int | None]], Report]]:
    """Return the tokens of each answer with the digests of their logits, if they were asked for, and its report."""
    numbers = [engine.add(each) for each in requests]
    found: dict[int, list[tuple[int, int | None]]] = {number: [] for number in numbers}
    while not engine.idle:
        for output in engine.step():
            found[output.sequence] += [] if output.token is None else [(output.token, output.digest)]
    return [(found[number], engine.report(number)) for number in numbers]


def conversation(length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(3, VOCABULARY, length).astype(np.int32)


def check_forks(engine: Engine, length: int, forks: int = FORKS, answer: int = 90, at: int = 70) -> list[int]:
    """Fork an answer; return what each fork had to compute."""
    prompt, exact = conversation(length), engine.config.exact
    params = SamplingParams(max_tokens=answer, temperature=0.0, logits_digest=exact)
    [(whole, _)] = run(engine, [Request(prompt, params, keeps_answer=True)])
    assert all((digest is not None) == exact for _, digest in whole)
    answered = np.array([token for token, _ in whole[:at]], np.int32)
    fork = Request(prompt, replace(params, max_tokens=answer - at), answered=answered)
    found = run(engine, [fork]) + run(engine, [fork] * (forks - 1))
    # In an exact engine with the same logits, to the bit.
    assert all(said == whole[at:] for said, _ in found), "a fork goes on as the answer did"
    computed = [length + at - report.cached_tokens for _, report in found]
    assert (length + at) % 64, "the fork is inside a cell"
    assert max(computed[1:]) <= 63
    return computed
