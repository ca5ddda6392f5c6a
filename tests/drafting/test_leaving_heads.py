"""An MTP head that is hardly ever right is read and not asked, until it is right. Rows that it has lost leave it.

Target and head are the rolling-hash devices of `test_head_following`, which compare every guess with that of a fresh
head. What the target gets in place of the guesses is wrong as often as a test says. Costs are a formula, so nothing
depends on a clock.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.following import following_workload
from tests.support.drafting.heads import HEAD
from tests.support.drafting.leaving_heads import (
    LENGTH,
    OFTEN,
    WatchedHead,
    check_guesses_are_judged_though_prompts_are_read_in_every_step,
    check_leaving_at_any_time,
    drive_and_check,
    engine_of,
    stream,
)
from tests.support.drafting.turning_down import Dear
from tests.support.engine.properties import parts, seed_of, thorough
from tests.support.hashed.rolling import rolling_spec
from weft.drafting import head as draft_head
from weft.drafting.head import DraftHead
from weft.drafting.model import DecodedDrafts
from weft.drafting.policy.acceptance import LEAST_RATE, MEMORY_OF_ALL, Acceptance
from weft.drafting.policy.choosing import PRIORS, Drafting, RowDrafts
from weft.drafting.policy.costs import FreeDrafts

PRIOR = PRIORS[DraftHead.name]


def check_head_that_becomes_right(seed: int, count: int = 6) -> Counter[str]:
    """The head is never right in the first half of the requests, and always in the second."""
    workload, random = following_workload(seed, count), Random(f"leaving {seed}")
    costs = random.choice([Dear, FreeDrafts])()
    drafting = Drafting(workload.spec.draft_room, costs=costs, model=DraftHead.name)
    run, head = engine_of(workload, seed, drafting)
    # A few guesses are enough here.
    drafting.overall[DraftHead.name] = Acceptance(random.choice([0.02, 0.04, 0.04, 0.6]), memory=MEMORY_OF_ALL)
    right_from(drafting, head, count // 2)
    drive_and_check(workload, run, head)
    return head.checked + Counter({"accepted": drafting.counts.accepted.total()})


def right_from(drafting: Drafting, head: WatchedHead, request: int) -> list[tuple[int, int]]:
    """Let guesses be wrong before this request arrives. Return what was proposed and computed before each of them."""
    begin, before = drafting.begin, list[tuple[int, int]]()

    def begun(*args):
        head.wrong = 1.0 if len(before) < request else 0.0
        before.append((drafting.counts.proposed.total(), head.checked["computed"]))
        return begin(*args)

    drafting.begin = begun
    return before


@pytest.fixture(autouse=True)
def learns_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "FOLLOWED_AT_ONCE", OFTEN)
    monkeypatch.setattr(draft_head, "FOLLOWED_IF_HOPELESS", OFTEN)


@pytest.mark.parametrize("part", parts(2))
def test_answers_are_the_undrafted_ones_whichever_rows_leave_and_when(part: int) -> None:
    @thorough(10)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 6))
    def check(seed: int, count: int) -> None:
        seed = seed_of(part, seed)
        check_leaving_at_any_time(seed, count)
        check_head_that_becomes_right(seed, count)

    check()


@pytest.mark.thorough
def test_rows_leave_at_all_times() -> None:
    met: Counter[str] = Counter()
    for seed in range(12):
        met += check_leaving_at_any_time(seed) + check_head_that_becomes_right(seed)
    print(met)
    least = {"left": 15, "left with drafts in flight": 3, "judged": 20, "preempted": 2, "accepted": 100}
    for name, count in least.items():
        assert met[name] >= count, met


# A prefix that is cached while the head is of no use must not keep it from being used later.
@pytest.mark.parametrize("shared", [0, 2 * HEAD.cell + 1])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_head_that_is_never_right_is_not_asked_until_it_is_right(depth: int, shared: int) -> None:
    wrong, all_ = 28, 60
    workload = stream(rolling_spec(cell=HEAD.cell, room=3), all_, depth, shared)
    drafting = Drafting(3, costs=Dear(), model=DraftHead.name)
    run, head = engine_of(workload, 1, drafting, room=8.0)
    before = right_from(drafting, head, wrong)
    drive_and_check(workload, run, head)
    proposed, computed = zip(*before, strict=True)
    learned = 12
    assert proposed[wrong] == proposed[learned], "it is asked for drafts"
    assert computed[wrong] - computed[learned] > 4 * (wrong - learned), "its entries would be missing"
    assert not head.left
    again = wrong + 8
    assert drafting.counts.accepted.total() > 0.5 * LENGTH * (all_ - again)


@pytest.mark.thorough
def test_short_answers_show_that_a_head_is_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "FOLLOWED_AT_ONCE", 64)
    monkeypatch.setattr(draft_head, "FOLLOWED_IF_HOPELESS", 2 * LENGTH)
    workload = stream(rolling_spec(cell=HEAD.cell, room=3), 120, depth=1)
    drafting = Drafting(3, costs=Dear(), model=DraftHead.name)
    for _ in range(60):
        drafting.overall.setdefault(DraftHead.name, Acceptance(PRIOR, memory=MEMORY_OF_ALL)).note(1, 0)
    run, head = engine_of(workload, 1, drafting, room=8.0)
    head.wrong = 0.0
    drive_and_check(workload, run, head)
    assert drafting.counts.accepted.total() > 0.3 * LENGTH * 120


def test_guesses_in_rows_that_wait_to_continue_do_not_keep_others_from_being_judged() -> None:
    workload = stream(rolling_spec(cell=HEAD.cell, room=3), 4, depth=1)
    run, head = engine_of(workload, 1, Drafting(3, costs=Dear(), model=DraftHead.name), room=8.0)
    waiting, running = (SimpleNamespace(length=9, lease=lease, drafting=None) for lease in (None, object()))
    head._unjudged = {0: (waiting, 9), 1: (running, 9)}, DecodedDrafts({}, dict)
    head.judge()
    assert head._unjudged is not None
    running.lease = None
    head.judge()
    assert head._unjudged is None
    drive_and_check(workload, run, head)


def test_guesses_are_judged_though_prompts_are_read_in_every_step() -> None:
    check_guesses_are_judged_though_prompts_are_read_in_every_step()


def note(acceptance: Acceptance, chance: float, random: Random) -> bool:
    acceptance.note(1, int(random.random() < chance))
    return acceptance.rate(0) < LEAST_RATE


def test_bad_luck_does_not_turn_a_head_off() -> None:
    new, misses = Acceptance(PRIOR, memory=MEMORY_OF_ALL), 1
    while not note(new, 0.0, Random(1)):
        misses += 1
    assert 0.5**misses < 1e-10
    assert misses == 37
    for seed in range(10):
        # It pays with few rows, and often it is not chosen with many.
        acceptance, random = Acceptance(PRIOR, memory=MEMORY_OF_ALL), Random(seed)
        assert not any(note(acceptance, 0.3, random) for _ in range(2000))
    # Of a head that was right, and never is again: how many guesses it takes to see that, and later the contrary.
    assert sum(not note(acceptance, 0.0, random) for _ in range(2000)) < 1300
    assert sum(note(acceptance, 0.6, random) for _ in range(200)) < 60


def test_a_row_in_which_the_head_is_right_asks_it_though_no_other_does() -> None:
    drafting = Drafting(3, model=DraftHead.name)
    good, bad = (drafting.begin(np.ones(4, np.int32), b"", None, None) for _ in range(2))
    guess = RowDrafts(DraftHead.name, DraftHead.name, (5,), (0.5,))
    for number in range(200):
        if number % 20 == 0:
            drafting.learn(good, guess, 1)
        drafting.learn(good, guess, 0)
        for _ in range(3):
            drafting.learn(bad, guess, 0)
    for _ in range(100):
        drafting.learn(bad, guess, 0)
    assert drafting.overall[DraftHead.name].rate(0) < LEAST_RATE
    new = drafting.begin(np.ones(4, np.int32), b"", None, None)
    asked = [each.find_drafts([1, 2, 3], 3, drafting.shared) for each in (good, bad, new)]
    assert asked[0].drafter == DraftHead.name
    assert asked[1:] == [None, None]
    assert all(each.model for each in (good, bad, new)), "all are read"
