"""A draft model beside the target: random traffic on the rolling-hash device, with memories and caches of both.

If both devices compute the same hash, every guess must be right: one wrong restore, stale tail or guess that was not
undone in the draft model's memory shows as a refused draft. Drafts are changed at random on their way to the target,
so they are refused at random places.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.draft_models import Garbled, check_perfect_guesses, draft_model, run_perfect, run_with
from tests.support.drafting.scripted import drafted_workload
from tests.support.engine.properties import parts, thorough
from tests.support.hashed.rolling import VOCABULARY, RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.drafting.model import DraftModel
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.ledger import Ledger

EXAMPLES = 13


def run_any(seed: int) -> Garbled:
    """A target and a draft model with other layers: most guesses are wrong, and no answer changes."""
    workload = drafted_workload(seed)
    kinds = [{"recurrent": False}, {"window": 5}, {"full": False}, {"recurrent": False, "window": 3}]
    model = draft_model(workload, rolling_spec(**Random(seed).choice(kinds)), seed)
    run_with(workload, model)
    return model


@pytest.mark.parametrize("part", parts(8))
def test_a_draft_model_changes_no_answer(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40))
    def check(seed: int) -> None:
        run_any(seed * 8 + part)

    check()


def test_guesses_that_were_refused_leave_no_trace() -> None:
    check_perfect_guesses()


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_of_a_model_are_decoded_at_every_depth(depth: int) -> None:
    assert sum(run_perfect(seed, depth=depth).accepted for seed in range(6)) > 20


def small_engine(tokens_per_step: int = 64, vocab_size: int = VOCABULARY) -> tuple[Engine, DraftModel]:
    spec = rolling_spec(cell=4, room=3)
    ledger = Ledger(spec, 1 << 16, 2, 256)
    model = DraftModel(ledger, RollingDevice(spec, 1 << 16, 2), vocab_size, tokens_per_step, paranoid=True)
    config = EngineConfig(memory_bytes=1 << 16, max_sequences=2, max_length=256, paranoid=True)
    drafting = Drafting(3, costs=FreeDrafts(), suffixes=False, model=model.name)
    return Engine(spec, RollingDevice(spec, 1 << 16, 2), config, drafting=drafting, draft_model=model), model


def answer(engine: Engine, prompt: list[int], count: int = 20, salt: bytes = b"") -> None:
    engine.add(Request(np.array(prompt, np.int32), SamplingParams(max_tokens=count, temperature=0.0), salt=salt))
    while not engine.idle:
        engine.step()


def test_after_a_hit_the_draft_model_resumes_from_its_own_cache_of_the_same_salt() -> None:
    engine, model = small_engine()
    prompt = list(range(80))
    computed = []
    for salt in (b"one", b"one", b"other"):
        before = model.executor.computed_tokens
        answer(engine, prompt, salt=salt)
        computed.append(model.executor.computed_tokens - before)
    assert computed[1] < computed[0] - 60
    assert computed[2] == computed[0], "cells of another salt were read"


def test_a_long_prompt_is_caught_up_in_bounded_pieces() -> None:
    engine, model = small_engine(tokens_per_step=10)
    most, launch = [], model.executor.launch
    model.executor.launch = lambda plan: most.append(len(plan.tokens)) or launch(plan)
    answer(engine, list(range(80)))
    assert max(most) <= 10
    assert engine.planner.drafting.counts.accepted.total() > 0


def test_tokens_that_the_draft_model_does_not_know_are_not_drafted() -> None:
    engine, model = small_engine(vocab_size=50)
    answer(engine, [1, 2, 3, 60])
    assert model.executor.computed_tokens == 0
    answer(engine, [1, 2, 3])
    assert model.executor.computed_tokens > 0
