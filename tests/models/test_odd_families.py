"""Families of other engines' users equal their public implementation, in sizes and options that nobody published.

docs/lab/families.md has the errors that `python -m tests.support.models.odd_families` printed.
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
