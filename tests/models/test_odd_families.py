"""Families of other engines' users equal their public implementation, in sizes and options that nobody published.

`python -m tests.support.models.odd_families` prints the errors of all of them; docs/lab has a study of 2026-11-19.
"""

from __future__ import annotations

import pytest

from tests.support.models.odd_families import COUNT, FAMILIES, configurations, worst_error

MOST = 5e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_configurations_have_the_log_probabilities_of_the_public_implementation(family):
    assert max(worst_error(tiny) for tiny in configurations(family, 3)) < MOST


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_odd_configurations_have_the_log_probabilities_of_the_public_implementation(family):
    assert COUNT >= 20
    assert max(worst_error(tiny) for tiny in configurations(family)) < MOST
