"""Whatever lies below the device, and whatever happens to it: answers are the oracle's, and what lies there is used."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.support.tiers.below import TIERS, Below, happened
from tests.support.tiers.load_choice import tiers_of

# Copies may run in threads: until all that a law is about has happened, but for no more workloads than these.
MOST = 100
MORE = int(os.environ.get("WEFT_EXAMPLES", "300"))


@pytest.fixture(autouse=True)
def every_prompt_is_worth_asking_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.memory.tiers.tiers.LEAST_SECONDS_TO_ASK", 0.0)
    # No test waits for a clock.
    monkeypatch.setattr("weft.memory.tiers.remote.discovery.PATIENCE_SECONDS", 1e9)


@pytest.mark.parametrize("name", TIERS)
def test_every_answer_is_the_oracles(name: str) -> None:
    below, seen = TIERS[name], Counter[str]()
    for seed in range(MOST):
        if seed >= below.least_seeds and all(seen[each] for each in below.wanted):
            break
        serve_workload(below, seed, seen)
    assert all(seen[each] for each in below.wanted), seen
    assert not any(seen[each] for each in below.unwanted), seen


@pytest.mark.slow
@pytest.mark.parametrize("name", TIERS)
def test_every_answer_is_the_oracles_often(name: str) -> None:
    for seed in range(MOST, MOST + MORE):
        serve_workload(TIERS[name], seed, Counter())


def serve_workload(below: Below, seed: int, seen: Counter[str]) -> None:
    for engine in below.run(seed):
        seen.update(happened(tiers_of(engine)))
