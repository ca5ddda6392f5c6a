"""Sampled answers with drafts have the undrafted distribution: a chi-square test with fixed seeds.

The device draws each token from a known chain, by the random number that the plan gives to the sample. So the
frequencies of all pairs of tokens are known, and a random number that is used twice, skipped after a wrong draft, or
chosen because a draft fits it, changes them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.drafting.mtp import Eager
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting, RowDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.engine.seat_sampling import SeatSampling

# The chance of each token after each token.
CHAIN = np.array([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
# The 99.9 % quantile of a chi-square distribution with 3 * 2 degrees of freedom.
LIMIT = 22.5
ANSWERS, LENGTH = 12, 150
SPEC = rolling_spec(cell=4, room=3)


class ChainDevice(RollingDevice):
    def execute(self, plan: Plan) -> Landing:
        plan = self.placed(plan)
        tokens = self._tokens(plan)
        found = []
        for (row, end), number in zip(zip(*self.samples_of(plan)), plan.sampling.uniform.tolist(), strict=True):
            last = tokens[row][end - int(plan.start[row]) - 1]
            found.append(int(np.searchsorted(CHAIN[last].cumsum(), number, side="right").clip(0, 2)))
        self.leave_on_board(plan, tokens, found)
        return Landing(np.array(found, np.int32), None, None)


class Favourite(Eager):
    """Drafts the same token again and again. A biased verification would prefer or avoid it."""

    def find_drafts(self, answer, most, shared, ahead=0):
        tokens = (1,) * (min(most, self.most) + ahead)
        return RowDrafts("suffix", "suffix", tokens, (0.9,) * len(tokens)) if tokens else None


class Favourites(Drafting):
    def begin(self, prompt, salt, most, prediction, grammar=None):
        return Favourite(prompt, salt, self.most, suffixes=False)


def answers(drafting: Drafting | None, depth: int = 0) -> list[list[int]]:
    config = EngineConfig(memory_bytes=1 << 18, max_sequences=8, max_length=256, depth=depth, paranoid=False)
    engine = Engine(SPEC, ChainDevice(SPEC, config.memory_bytes, 8), config, drafting=drafting)
    found: dict[int, list[int]] = {}
    for seed in range(ANSWERS):
        params = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=seed)
        found[engine.add(Request(np.zeros(3, np.int32), params))] = []
    while not engine.idle:
        for output in engine.step():
            found[output.sequence].append(output.token)
    return list(found.values())


def chi_square(found: list[list[int]]) -> float:
    """The statistic of all pairs of successive tokens against the chain."""
    counts = np.zeros_like(CHAIN)
    for answer in found:
        np.add.at(counts, (answer[:-1], answer[1:]), 1)
    expected = counts.sum(1, keepdims=True) * CHAIN
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_after_drafts_have_the_undrafted_distribution(depth: int) -> None:
    drafting = Favourites(3, costs=FreeDrafts())
    found = answers(drafting, depth)
    assert drafting.counts.accepted.total() > 200
    assert drafting.counts.proposed.total() - drafting.counts.accepted.total() > 200
    assert chi_square(found) < LIMIT
    assert found == answers(None, depth), "a seed must give the same text with and without drafts"


def test_random_numbers_that_fit_drafts_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: all samples of a row have the random number of its first."""
    original = SeatSampling.gather

    def same(self, seats, sequences, starts, boarded, ahead, *late):
        sampling = original(self, seats, sequences, starts, boarded, ahead, *late)
        numbers = sampling.uniform.copy()
        for sample in ahead.before.nonzero()[0]:
            numbers[sample] = numbers[sample - 1]
        return replace(sampling, uniform=numbers)

    monkeypatch.setattr(SeatSampling, "gather", same)
    assert chi_square(answers(Favourites(3, costs=FreeDrafts()))) > 4 * LIMIT
