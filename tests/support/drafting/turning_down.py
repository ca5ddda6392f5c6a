"""Drafts that never pay, and rows that pause."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np

from tests.support.hashed.rolling import VOCABULARY
from weft.drafting.policy.choosing import Drafting, RowDrafts, SequenceDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.policy.suffix import Match
from weft.drafting.rows import DraftRows

ANSWER = [place * 7 % VOCABULARY for place in range(700)]


class Guesses(SequenceDrafts):
    """Wrong drafts up to a length of the answer, right ones from there on, in every step that asks."""

    def __init__(self, most: int, overall: dict, right_from: int) -> None:
        super().__init__(np.zeros(0, np.int32), b"", most, overall=overall, suffixes=False)
        self.right_from, self.asked = right_from, 0

    def find_drafts(self, answer, most, shared, ahead=0):
        self.asked += 1
        first, count = len(answer), min(min(most, self.most) + ahead, len(ANSWER) - len(answer))
        tokens = [(ANSWER[i] + (i < self.right_from)) % VOCABULARY for i in range(first, first + count)]
        return self._drafts_of("suffix", "suffix", Match(3, tuple(tokens))) if tokens else None


class Dear(FreeDrafts):
    """Every draft takes a twentieth of a step, as on a device with few rows."""

    def ratio(self, rows: int, drafts: int) -> float:
        return 1 + 0.05 * drafts


class Paused(Guesses):
    """Drafts of a row whose pause after a verification is set by the test."""

    pauses = 0

    def verified(self, proposal: RowDrafts, accepted: int) -> int:
        return self.pauses


def check_every_row_wakes_when_its_time_has_come() -> None:
    """Random rows sit down, sleep and leave; all that are awake are found, and no other."""
    random, seats = Random(5), 6
    drafting = Drafting(4, costs=FreeDrafts())
    proposal = RowDrafts("a", "a", (1,), (0.5,))
    woken = slept = 0
    for _ in range(20):
        rows = DraftRows(drafting, SimpleNamespace(), seats)
        wakes: dict[int, int] = {}
        sleepers = [SimpleNamespace(drafting=Paused(4, {}, 0), leaving=False) for _ in range(seats)]
        for number in range(1, 80):
            for seat, sleeper in enumerate(sleepers):
                if seat not in wakes and random.random() < 0.05:
                    rows.sit(seat, sleeper)
                    wakes[seat] = 0
                elif seat in wakes and random.random() < 0.02:
                    rows.stand_up(seat, returns=False)
                    del wakes[seat]
                elif wakes.get(seat, number + 1) <= number and random.random() < 0.7:
                    sleeper.drafting.pauses = random.choice((0, 1, 4, 30))
                    rows.verified(seat, sleeper, proposal, 0, number)
                    wakes[seat] = number + sleeper.drafting.pauses
            decoding = np.array([seat for seat in wakes if random.random() < 0.9], np.int64)
            expected = [seat for seat in decoding.tolist() if wakes[seat] <= number]
            assert rows.awake(decoding, number) == expected
            woken, slept = woken + bool(expected), slept + (not expected)
    assert min(woken, slept) > 200
