"""An MTP head whose guesses stay on the device, and follow drafts of which the host does not know how many are right.

Target and head are rolling-hash devices. The head's entry at a position is a hash of the token after it and of what the
target left there, so every guess shows whether the head has read the right states, tokens and entries, and has undone
all others. What the target gets in place of the guesses is right by chance.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.heads import (
    check_a_row_that_looks_back_lets_no_other_row_wait_for_a_landing,
    check_guesses_follow_drafts_in_flight,
    check_rows_copy_from_texts_beside_a_head_that_follows,
    run_head,
)
from tests.support.engine.properties import parts, thorough

EXAMPLES = 10


@pytest.mark.parametrize("part", parts(8))
def test_every_guess_is_that_of_a_fresh_head_and_every_answer_the_undrafted_one(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 6))
    def check(seed: int, count: int) -> None:
        run_head(seed * 8 + part, count)

    check()


def test_guesses_follow_drafts_in_flight() -> None:
    check_guesses_follow_drafts_in_flight()


def test_rows_copy_from_texts_beside_a_head_that_follows() -> None:
    check_rows_copy_from_texts_beside_a_head_that_follows()


@pytest.mark.parametrize("draft", [None, 0])
def test_a_row_that_looks_back_lets_no_other_row_wait_for_a_landing(draft: int | None) -> None:
    """Other rows draft too, or not at all; the row that looks back has drafts when it is alone."""
    check_a_row_that_looks_back_lets_no_other_row_wait_for_a_landing(draft)
