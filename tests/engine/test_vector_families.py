"""Vectors of tiny models of every family, beside answers and after hits, are those of cold runs alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.models.engines import FAMILIES, Ask, greedy, make_engine, serve, tokens
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting


def vector(first: int) -> SamplingParams:
    return SamplingParams(max_tokens=0, vector_from=first)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_beside_answers_are_those_of_cold_runs(family: str) -> None:
    stem = tokens(130, 1)
    prompts = [(stem + tokens(20, 2), 149), (stem + tokens(9, 3), 0), (tokens(1, 4), 0), (stem + tokens(70, 5), 150)]
    asks = [Ask(prompt, vector(first), step) for step, (prompt, first) in enumerate(prompts)]
    engine = make_engine(family, max_tokens_per_step=96, drafting=Drafting(4), depth=1)
    found = serve(engine, [Ask(stem, greedy(20)), *asks, Ask(stem, vector(129), 30)])[1:]
    assert found[-1].report.cached_tokens == 128
    assert not found[0].tokens
    for ask, answer in zip([*asks, Ask(stem, vector(129))], found, strict=True):
        [cold] = serve(make_engine(family, cache=False), [Ask(ask.prompt, ask.params)])
        assert np.abs(answer.report.vector.mean - cold.report.vector.mean).max() < 1e-4
        assert answer.report.vector.tokens == len(ask.prompt) - (ask.params.vector_from or 0)
