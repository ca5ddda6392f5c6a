"""Families without recurrent layers equal their public implementation."""

from __future__ import annotations

import pytest

from tests.support.models.oracle import assert_parity, make_pair
from tests.support.models.plain_models import ODD_PLAIN, PLAIN


@pytest.mark.parametrize("name", PLAIN)
def test_logits_and_greedy_answers_equal_the_public_implementation(name, tmp_path):
    assert_parity(make_pair(PLAIN[name], tmp_path))


@pytest.mark.parametrize("name", ODD_PLAIN)
def test_odd_configurations_equal_the_public_implementation(name, tmp_path):
    assert_parity(make_pair(ODD_PLAIN[name], tmp_path))
