"""Preemption beside what a request accumulates: scores of its prompt, and the tokens that penalties look at.

Sequences are preempted in the middle of their prompts and of their answers. Everything they return must equal a
cacheless run of each request alone.
"""

from __future__ import annotations

import pytest

from tests.support.engine.preemption import FAMILIES, check_scores_and_penalties_do_not_depend_on_preemptions


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_penalties_do_not_depend_on_preemptions(family: str, depth: int) -> None:
    check_scores_and_penalties_do_not_depend_on_preemptions(family, depth)
