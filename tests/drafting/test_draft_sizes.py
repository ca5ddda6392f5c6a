"""Drafts of many rows fit the steps that a GPU has recorded, and trials of sizes that do not pay cost little.

No clock is read: steps last as long as a table says, on a device that counts them.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.drafts import FALLING, NEVER
from tests.support.drafting.draft_sizes import check_many_rows_draft_in_recorded_steps_and_miss_none, first_steps, gain
from tests.support.drafting.suffixes import LinearCosts
from tests.support.drafting.timed_steps import ROOM
from weft.drafting.policy.choosing import Drafting, RowDrafts
from weft.drafting.rows import spread
from weft.runner.cuda.recorded import draft_counts, draft_sizes


def test_many_rows_draft_in_recorded_steps_and_miss_none() -> None:
    check_many_rows_draft_in_recorded_steps_and_miss_none()


@pytest.mark.parametrize(("chances", "count"), [(FALLING, 45), (NEVER, 200)])
def test_trials_of_sizes_that_do_not_pay_cost_little(chances: tuple[float, ...], count: int) -> None:
    # Two tokens a row take 1.7 times as long as one, and four 3.1 times.
    steps = first_steps(chances, 4.0, count)
    assert any(sum(drafts) for _, drafts in steps), "drafts are tried"
    assert gain(steps, chances) > 0.98


@given(st.integers(1, 600), st.sampled_from([1, 40, 256, 300, 600]), st.floats(0, 0.01), st.integers(0, 1 << 30))
def test_chosen_drafts_have_a_recorded_step(rows: int, seats: int, cost: float, seed: int) -> None:
    rows, random, sizes = min(rows, seats), Random(seed), draft_sizes(seats, ROOM)
    drafting = Drafting(ROOM, costs=LinearCosts(cost))
    drafting.counts_that_fit = lambda rows: draft_counts(sizes, rows)
    chance = random.random()
    offers = [tuple(chance ** (place + random.random()) for place in range(1, ROOM + 1)) for _ in range(rows)]
    offers = [tuple(sorted(worth[: random.randint(0, ROOM)], reverse=True)) for worth in offers]
    offers = [worth for worth in offers if worth]
    lengths = drafting.choose([RowDrafts("a", "a", (1,) * len(worth), worth) for worth in offers], rows, 1 << 20)
    tokens = rows + sum(lengths)
    if any(lengths):
        assert any(size.holds(0, rows, tokens, tokens, 1 + max(lengths)) for size in sizes)
    # With one token more, a size that is filled holds the rows no longer.
    for count in draft_counts(sizes, rows):
        smallest = next(size for size in sizes if size.holds(0, rows, rows + count, rows + count))
        assert not smallest.holds(0, rows, rows + count + 1, rows + count + 1) or count == rows * ROOM
    assert drafting.possible(rows) == any(size.holds(0, rows, rows + 1, rows + 1) for size in sizes)


def test_rows_that_follow_others_take_drafts_from_rows_with_several() -> None:
    worth = [(0.5, 0.4, 0.3), (0.4, 0.35, 0.1), (0.2,), (0.3,), (0.1,)]
    proposals = [RowDrafts("a", "a", (1,) * len(each), each) for each in worth]
    lengths = [3, 2, 0, 0, 0]
    spread(lengths, proposals, [True, True, True, False, True])
    assert lengths == [2, 1, 1, 0, 1], "the least likely drafts go first, and a row that decodes needs none"
    lengths = [1, 0, 0, 0, 0]
    spread(lengths, proposals, [False, True, False, False, False])
    assert lengths == [1, 0, 0, 0, 0], "no row has one to spare"
    proposals = [RowDrafts("a", "a", (1,) * len(each), each) for each in [(0.9, 0.8, 0.8), (0.05,), (0.3,)]]
    lengths = [3, 0, 0]
    spread(lengths, proposals, [True, True, True])
    assert lengths == [2, 0, 1], "a row whose guess is hopeless decodes alone, and then without drafts"
