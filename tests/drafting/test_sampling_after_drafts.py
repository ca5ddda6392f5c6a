"""A sample after drafts is taken exactly as if they were the end of the answer: every field that a row may have."""

from __future__ import annotations

import pytest

from tests.support.drafting.sampling_after_drafts import CASES, check_case


@pytest.mark.parametrize("part", range(3))
def test_a_sample_after_drafts_is_taken_as_if_they_were_the_end_of_the_answer(part: int) -> None:
    for seed in range(part, CASES, 3):
        check_case(seed)
