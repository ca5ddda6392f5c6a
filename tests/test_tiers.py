"""Whatever is saved, loaded, evicted, cancelled, aborted or preempted: the answers are the oracle's."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiered import run_tiered, tiered_workload

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "400"))
PARTS = 6


def thorough(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_every_answer_is_the_oracles_with_host_memory(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10))
    def check(seed: int, count: int) -> None:
        seed = seed * PARTS + part
        run_tiered(tiered_workload(seed, count), seed)

    check()
