"""Nothing follows a stop token, not even a draft that is right: it is neither counted nor computed for others."""

from __future__ import annotations

import pytest

from tests.support.drafting.drafts_at_stops import check
from tests.support.drafting.scripted import Unfollowed


@pytest.mark.parametrize("place", range(1, 16))
@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_after_a_stop_token_is_not_accepted(place: int, depth: int) -> None:
    check(place, depth, Unfollowed)
