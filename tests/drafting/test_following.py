"""Rows that follow drafts in flight: a step is planned before the host knows where the rows of the last one end.

The rolling-hash device finds out on its board where a row starts, so a wrong page, slot, cursor or guess changes the
answer. Acceptance is random, and so is everything else that can happen between launch and landing.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.following import run_following
from tests.support.drafting.scripted import plans_of
from tests.support.engine.properties import parts, thorough
from tests.support.hashed.rolling import RollingDevice
from weft.drafting.policy.choosing import Drafting, RowDrafts, SequenceDrafts

EXAMPLES = 12


@pytest.mark.parametrize("part", parts(8))
def test_every_answer_is_the_undrafted_one(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 6))
    def check(seed: int, count: int) -> None:
        run_following(seed * 8 + part, count)

    check()


def test_rows_follow_in_all_ways() -> None:
    met: Counter[str] = Counter()
    for seed in range(20):
        met += run_following(seed)
    for name, least in {"follows": 100, "moved": 50, "cell before": 25, "not captured": 10, "captured": 10}.items():
        assert met[name] >= least, met
    assert met["too large"] >= 20, met
    assert met["preempted"], met


def test_rows_with_drafts_are_in_every_plan_if_the_device_follows_them() -> None:
    _, plans = plans_of(asked=4, drafting_rows=4, kind=RollingDevice)
    ahead = [plan for plan, landed in plans if landed < plan.number - 1 and len(plan.drafts.unverified_before)]
    assert len(ahead) > 0.5 * len(plans)


def test_steps_wait_where_what_is_lost_is_less_than_what_is_known() -> None:
    drafts = SequenceDrafts(np.zeros(0, np.int32), b"", 3)
    proposal = RowDrafts("grammar", "forced", (1, 2, 3), (0.9, 0.8, 0.7))
    known, unknown = drafts.outlook(proposal)
    # Three drafts of 0.99: the guesses after them are right if those and one more are.
    assert known == pytest.approx(0.99 + 0.99**2 + 0.99**3)
    assert unknown == pytest.approx(known / (1 + (1 - 0.99**4) / 0.99))
    drafting = Drafting(3)
    assert not drafting.plans_ahead(3.0, 2.0, lost=0.4)
    assert drafting.plans_ahead(3.0, 2.0, lost=0.6)
