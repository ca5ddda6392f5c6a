"""Drafts change no answer: random acceptance on the rolling-hash device, with everything else that can happen to a row.

Scripted drafts continue the oracle's answer and are wrong at random places, so rows are settled anywhere: inside a
cell, at its border and beyond it, while other rows are a flight ahead, memory is short, and requests are aborted
between launch and landing.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.scripted import plans_of, run_drafted
from tests.support.engine.properties import parts, thorough
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.rows import MOST_HISTORY
from weft.engine.loop import Engine
from weft.engine.request import Request

EXAMPLES = 60


@pytest.mark.parametrize("part", parts(8))
def test_every_answer_is_the_undrafted_one(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 8))
    def check(seed: int, count: int) -> None:
        run_drafted(seed * 8 + part, count)

    check()


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_are_accepted_and_refused_at_every_depth(depth: int) -> None:
    proposed = accepted = 0
    for seed in range(20):
        counts = run_drafted(seed, depth=depth).counts
        proposed, accepted = proposed + counts.proposed.total(), accepted + counts.accepted.total()
    assert accepted > 40
    assert proposed - accepted > 40


def test_a_row_with_drafts_in_flight_is_in_no_other_plan() -> None:
    _, plans = plans_of(asked=8, drafting_rows=1)
    flying: dict[int, int] = {}
    for plan, landed in plans:
        assert not {seat for seat, number in flying.items() if number > landed} & set(plan.seat.tolist())
        flying |= {int(seat): plan.number for seat in plan.seat[plan.draft_counts > 0]}
    assert len(flying) == 1


def test_rows_without_drafts_stay_a_step_ahead_of_few_with() -> None:
    _, plans = plans_of(asked=8, drafting_rows=1)
    after_drafts = [landed < before.number for (before, _), (_, landed) in pairwise(plans) if len(before.drafts.counts)]
    assert len(after_drafts) > 2
    assert all(after_drafts[:-1])


def test_a_step_waits_for_its_predecessor_if_most_rows_drafted_in_it() -> None:
    _, plans = plans_of(asked=4, drafting_rows=4)
    for (before, _), (_, landed) in pairwise(plans):
        if (before.draft_counts > 0).sum() > 1:
            assert landed == before.number


def test_no_draft_is_computed_beyond_the_last_token_wanted() -> None:
    engine, plans = plans_of(asked=2, drafting_rows=2, depth=0)
    assert engine.planner.drafting.counts.accepted.total() > 10
    # The last token is sampled and never computed.
    assert max(int(plan.end.max()) for plan, _ in plans) == 3 + 24 - 1


class RecordingDevice(RollingDevice):
    """Answers anything, and records the drafts and the histories of each step."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.drafts: list[int] = []
        self.histories: list[int] = []

    def execute(self, plan: Plan) -> Landing:
        self.drafts.append(int(plan.drafts.counts.sum()))
        self.histories.append(len(plan.sampling.history_token))
        return Landing(np.zeros(plan.sample_count, np.int32), None, None)


@pytest.mark.parametrize(("length", "most"), [(100, 6), (4000, 3), (9000, 0)])
def test_rows_with_penalties_draft_as_far_as_their_histories_are_bounded(length: int, most: int) -> None:
    spec = rolling_spec(room=6, recurrent=False)
    config = EngineConfig(memory_bytes=1 << 22, max_sequences=1, max_length=length + 20, max_tokens_per_step=length)
    engine = Engine(
        spec, RecordingDevice(spec, config.memory_bytes, 1), config, drafting=Drafting(6, costs=FreeDrafts())
    )
    guess = np.zeros(10, np.int32)
    params = SamplingParams(max_tokens=10, repetition_penalty=1.1)
    engine.add(Request(np.ones(length, np.int32), params, prediction=guess))
    while not engine.idle:
        engine.step()
    device = engine._device
    assert max(device.drafts) == most
    assert max(device.histories) <= max(MOST_HISTORY, length + 10)
