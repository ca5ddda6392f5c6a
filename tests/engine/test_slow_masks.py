"""A mask that takes long delays the row that needs it and no other, and changes no answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.late_masks import EarlyDevice, HashedConstraint
from tests.support.engine.properties import parts, thorough
from tests.support.engine.slow_masks import (
    ANSWER,
    CostlyConstraint,
    HeldConstraint,
    Watched,
    alone,
    check_tenants_take_turns_in_the_thread,
    check_that_others_go_on,
    check_the_bound_of_a_step,
    compare,
)
from tests.support.hashed.rolling import RollingDevice
from weft.engine.events import FinishReason
from weft.engine.masks import STEP_SECONDS, MaskFinder

DEVICES = [(0, RollingDevice), (1, RollingDevice), (1, EarlyDevice)]


@pytest.mark.parametrize(("depth", "kind"), DEVICES)
@pytest.mark.parametrize("slow_from", [0, 1, 5])
def test_other_rows_are_answered_to_the_end_while_a_mask_is_looked_for(depth, kind, slow_from) -> None:
    check_that_others_go_on(depth, kind, slow_from)


@pytest.mark.parametrize(("depth", "kind"), DEVICES)
def test_a_row_is_in_no_step_without_its_mask(depth, kind) -> None:
    watched, constraint = Watched(2, depth, kind), HeldConstraint(0)
    watched.add(constraint)
    watched.run_until_finished(watched.add())
    # Its prompt, and nothing else.
    assert sum(0 in plan.seat.tolist() for plan in watched.plans) == 1
    constraint.allow()
    watched.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_end_of_a_grammar_is_the_same_whenever_its_mask_is_found(depth: int) -> None:
    for ends, breaks, finish, count in (
        (5, 99, FinishReason.STOP, 5),
        (99, 5, FinishReason.ERROR, 5),
        (ANSWER, 99, FinishReason.STOP, ANSWER),
        (99, ANSWER, FinishReason.ERROR, ANSWER),
        (99, 99, FinishReason.LENGTH, ANSWER),
    ):
        for slow_from in (0, 2, 99):
            watched, constraint = Watched(1, depth), HeldConstraint(0, slow_from, ends, breaks)
            number = watched.add(constraint)
            constraint.allow()
            watched.run()
            assert (watched.tokens(number), watched.finish(number)) == (alone()[:count], finish)
            assert (watched.outputs[number][-1].error is not None) == (finish is FinishReason.ERROR)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_without_an_answer_does_not_end_the_row_beside_it_whose_last_mask_is_looked_for(depth: int) -> None:
    for ends, breaks, finish in ((1, 99, FinishReason.STOP), (99, 1, FinishReason.ERROR)):
        watched, constraint = Watched(2, depth), HeldConstraint(0, 0, ends, breaks)
        number, silent = watched.add(constraint, count=1), watched.add(count=0)
        watched.run_until_finished(silent)
        constraint.allow()
        watched.run()
        assert (watched.tokens(number), watched.finish(number)) == (alone()[:1], finish)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_is_aborted_while_its_mask_is_looked_for_is_gone_at_once(depth: int) -> None:
    watched, constraint = Watched(2, depth), HeldConstraint(0)
    number = watched.add(constraint)
    while not constraint.begun.acquire(blocking=False):
        watched.step()
    watched.engine.abort(number)
    watched.run()
    assert watched.finish(number) is FinishReason.ABORT
    assert not watched.engine.ledger.leases
    constraint.allow()
    other = watched.add()
    watched.run()
    assert len(watched.tokens(other)) == ANSWER


def test_tenants_take_turns_in_the_thread() -> None:
    check_tenants_take_turns_in_the_thread()


# the bound of a step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "kind"), DEVICES)
def test_masks_take_no_more_of_a_step_than_its_bound(depth, kind) -> None:
    check_the_bound_of_a_step(depth, kind)


def test_cheap_masks_are_found_between_two_steps_and_every_step_has_their_rows() -> None:
    watched = Watched(8, 1)
    constraints = [CostlyConstraint(number, STEP_SECONDS / 100) for number in range(8)]
    for constraint in constraints:
        watched.add(constraint)
    watched.run()
    assert all(here for constraint in constraints for here in constraint.here)
    assert [plan.rows for plan in watched.plans[:ANSWER]] == [8] * ANSWER


def test_looking_ahead_counts_and_a_slow_grammar_has_no_drafts() -> None:
    counted = MaskFinder(step_seconds=1.0)
    quick, slow = HashedConstraint(0), HeldConstraint(0)
    assert counted.affords(quick)
    assert not counted.affords(slow)
    counted.spend(1.5)
    assert not counted.affords(quick)
    counted.begin_step()
    assert counted.affords(quick)


# any traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", parts(4))
def test_every_answer_is_the_one_with_quick_masks(part: int) -> None:
    @thorough(30)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 8))
    def check(seed: int, count: int) -> None:
        compare(seed * 4 + part, count)

    check()


def test_a_failure_of_the_thread_that_is_no_fault_of_the_request_stops_the_engine() -> None:
    class Broken(HeldConstraint):
        def take(self, token: int) -> None:
            raise ZeroDivisionError

    watched = Watched(1, 0)
    watched.add(Broken(0))
    with pytest.raises(ZeroDivisionError):
        watched.run()
