"""A cache hit equals a cold run: divergence, strangers in reused memory, branches, declared points, windows."""

from __future__ import annotations

import pytest

from tests.support.engine.hits import (
    HYBRID,
    WINDOWED,
    check_a_declared_point_is_kept_and_hit_by_the_next_request,
    check_a_hit_after_decode_does_not_diverge_from_a_cold_run,
    check_a_hit_after_prefill_does_not_diverge_from_a_cold_run,
    check_a_resume_point_keeps_exactly_the_window_that_it_needs,
    check_a_running_sequence_holds_one_slot_shared_until_it_passes_a_cell,
    check_no_stranger_shows_through,
    check_the_reason_of_every_miss_is_told,
    check_window_pages_are_returned_while_the_request_still_runs,
    check_without_regular_snapshots_the_third_branch_still_hits,
)
from tests.support.models.engines import (
    FAMILIES,
    Ask,
    greedy,
    make_engine,
    serve,
    spec_of,
    tokens,
)
from weft.engine.loop import Engine
from weft.memory.captures import spacing


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_remembers_is_what_its_model_says(family: str) -> None:
    spec = spec_of(family)
    assert (bool(spec.window), bool(spec.state_bytes)) == (family in WINDOWED, family in HYBRID)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_after_prefill_does_not_diverge_from_a_cold_run(family: str) -> None:
    check_a_hit_after_prefill_does_not_diverge_from_a_cold_run(family)


# The depth changes plans, not layers: every second family meets each, and the other one with the slow tests.
@pytest.mark.parametrize(
    ("family", "depth"),
    [
        pytest.param(family, depth, marks=() if depth == place % 2 else pytest.mark.slow)
        for place, family in enumerate(FAMILIES)
        for depth in (0, 1)
    ],
)
def test_a_hit_after_decode_does_not_diverge_from_a_cold_run(family: str, depth: int) -> None:
    check_a_hit_after_decode_does_not_diverge_from_a_cold_run(family, depth)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_stranger_shows_through(family: str) -> None:
    """A long stranger fills all memory; then fresh and resumed rows, alone and in a batch, as in a new engine."""
    check_no_stranger_shows_through(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_third_of_three_branches_resumes_where_they_part(family: str) -> None:
    engine, stem = make_engine(family), tokens(257, 10)
    answers = [serve(engine, [Ask(stem + tokens(100 + 30 * i, 11 + i), greedy(4))])[0] for i in range(3)]
    cached = [answer.report.cached_tokens for answer in answers]
    assert cached[0] == 0
    assert cached[2] == 256
    # The first one's prefill left candidates, since there was room: the second hits already.
    assert cached[1] == (256 if candidates_or_free(engine) else 0)


def candidates_or_free(engine: Engine) -> bool:
    """Window pages alone are no candidates: without a state, only what is kept for a reason is."""
    ledger = engine.ledger
    return ledger.snapshots.candidates or not ledger.cache.point_bytes or 256 % spacing(ledger.spec) == 0


@pytest.mark.parametrize("family", HYBRID)
def test_without_regular_snapshots_the_third_branch_still_hits(family: str) -> None:
    check_without_regular_snapshots_the_third_branch_still_hits(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_that_arrive_together_share_their_stem_at_once(family: str) -> None:
    """Nobody computes what a running sequence is about to compute: the others wait and resume from it."""
    engine, stem = make_engine(family, max_tokens_per_step=2048), tokens(257, 15)
    asks = [Ask(stem + tokens(20, 16 + i), greedy(4)) for i in range(4)]
    cached = [answer.report.cached_tokens for answer in serve(engine, asks)]
    assert cached == [0, 256, 256, 256]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_declared_point_is_kept_and_hit_by_the_next_request(family: str) -> None:
    check_a_declared_point_is_kept_and_hit_by_the_next_request(family)


@pytest.mark.parametrize("family", WINDOWED)
def test_window_pages_are_returned_while_the_request_still_runs(family: str) -> None:
    check_window_pages_are_returned_while_the_request_still_runs(family)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_resume_point_keeps_exactly_the_window_that_it_needs(family: str) -> None:
    check_a_resume_point_keeps_exactly_the_window_that_it_needs(family)


@pytest.mark.parametrize("family", HYBRID)
def test_a_running_sequence_holds_one_slot_shared_until_it_passes_a_cell(family: str) -> None:
    check_a_running_sequence_holds_one_slot_shared_until_it_passes_a_cell(family)


def test_the_reason_of_every_miss_is_told() -> None:
    check_the_reason_of_every_miss_is_told()
