"""After the first fork at a token of a long conversation, each computes less than a cell, in every recurrent family."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.models.engines import VOCABULARY, make_engine, spec_of
from tests.support.models.exact_traffic import exact_engine, exact_model
from tests.support.models.forks import FORKS, check_forks, run
from tests.support.models.hybrid_models import HYBRIDS
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request

RECURRENT = tuple(HYBRIDS)


def engine_for(family: str, exact: bool, length: int, memory: int) -> Engine:
    # Not paranoid: an audit after each step would take most of the time.
    settings = {"max_length": length + 200, "max_sequences": FORKS, "paranoid": False}
    if exact:
        return exact_engine(exact_model(family, torch.float32), memory, **settings)
    return make_engine(family, memory, **settings)


@pytest.mark.parametrize("exact", [False, True], ids=["usual", "exact"])
@pytest.mark.parametrize("family", RECURRENT)
def test_forks_at_one_token_compute_less_than_a_cell(family: str, exact: bool) -> None:
    assert spec_of(family).state_bytes
    check_forks(engine_for(family, exact, 700, 128 << 20), 700, forks=8, answer=20, at=9)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["usual", "exact"])
@pytest.mark.parametrize("family", RECURRENT)
def test_64_forks_of_20000_tokens_compute_less_than_a_cell(family: str, exact: bool) -> None:
    computed = check_forks(engine_for(family, exact, 20_000, 1 << 30), 20_000)
    print(f"{family} {'exact' if exact else 'usual'}: first {computed[0]}, others at most {max(computed[1:])}")


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_ten_turns_with_stripped_reasoning_compute_little_more_than_what_is_new(family: str) -> None:
    """As `tests/engine/test_edits.py` does on the hash device, on models."""
    engine, random = make_engine(family, 128 << 20, max_length=4000, paranoid=False), np.random.default_rng(5)
    history, ends, known = random.integers(3, VOCABULARY, 300).tolist(), [300], 0
    for turn in range(10):
        history += random.integers(3, VOCABULARY, 50).tolist()
        ends.append(len(history))
        params = SamplingParams(max_tokens=80, temperature=0.0)
        prompt = [*history, 3, 5]
        request = Request(np.array(prompt, np.int32), params, boundaries=tuple(ends))
        [(answer, report)] = run(engine, [request])
        if turn >= 2:
            assert len(prompt) - report.cached_tokens <= len(prompt) - known + 128
        known = len(prompt)
        # The first part of the answer is reasoning, which the next turn does not have.
        history += [3, 5, *(token for token, _ in answer[-30:])]
        ends.append(len(history))
