"""Whatever arrives, is shared, chunked, evicted, preempted, aborted or undone: the answers are the oracle's.

Thousands of random workloads on the rolling-hash device, with an audit after every step. `WEFT_EXAMPLES` sets how many
per part; with `WEFT_EXAMPLES=100000` this becomes a soak test. Parts beyond the first are more of the same with other
seeds: CI runs the second, `pytest -m slow` the others.
"""

from __future__ import annotations

import os
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import parts, record_plans, same_plan, thorough
from tests.support.hashed.rolling import VOCABULARY, RollingDevice, oracle, rolling_spec
from tests.support.hashed.workloads import random_workload, run_and_check
from weft.base.sampling import SamplingParams
from weft.engine.assembly import StepBuilder, assemble
from weft.engine.request import Request
from weft.engine.seat_sampling import SeatSampling
from weft.engine.sequence import Sequence
from weft.memory.audit import audit, check_plan
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger

PARTS = 16
# Half as many as may pass before a planted bug is noticed: CI also runs the second part.
EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "100"))


@pytest.mark.parametrize("part", parts(PARTS))
def test_every_answer_is_the_oracles(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10))
    def check(seed: int, count: int) -> None:
        run_and_check(random_workload(seed * PARTS + part, count))

    check()


@pytest.mark.parametrize("part", parts(PARTS))
def test_every_exact_answer_has_the_bits_of_a_lone_cold_run(part: int) -> None:
    """On a device that rounds differently for other chunks, and for decodes."""

    @thorough(EXAMPLES // 2)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10))
    def check(seed: int, count: int) -> None:
        run_and_check(random_workload(seed * PARTS + part, count, exact=True))

    check()


@thorough(EXAMPLES // 4)
@given(seed=st.integers(0, 1 << 40))
def test_two_ranks_given_the_same_requests_make_the_same_plans(seed: int) -> None:
    plans = []
    for _ in range(2):
        workload = random_workload(seed, count=5)
        plans.append(record_plans(workload))
    first, second = plans
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert same_plan(a, b)


class Speculator:
    """Drives ledger and device by hand: rows with drafts, of which only some are accepted."""

    def __init__(self, random: Random, room: int) -> None:
        self.random = random
        self.room = room
        self.spec = rolling_spec(
            window=random.choice([None, 3, 7]), heavy=random.random() < 0.5, room=room, full=random.random() < 0.8
        )
        self.memory = 1 << 14
        self.ledger = Ledger(self.spec, self.memory, seats=4, max_length=200, remember_freed=True)
        self.device = RollingDevice(self.spec, self.memory, seats=4)
        self.choices = SeatSampling(4)
        self.number = 0

    def run_sequence(self, seat: int, truth: list[int]) -> int:
        """Read `truth` in rows of random length with wrong drafts behind, and return the token after it."""
        sequence = self.sit(seat, truth)
        assert sequence.lease is not None
        token = None
        while (start := int(self.ledger.planned[seat])) < len(truth):
            right = self.random.randint(1, 6)
            end = min(len(truth), start + right)
            wrong = self.random.randint(0, self.room)
            drafts = [(t + 1) % VOCABULARY for t in (truth[end:] + [0] * wrong)[:wrong]]
            sequence.known = np.array(truth[:end] + drafts, np.int32)
            token = self.step(sequence, start, end + wrong, accepted=end)
            if wrong:
                token = None
        if token is None:
            # The last row had drafts behind it: its own token was not the last of the row. Read it again.
            return self.reread(sequence, truth)
        self.ledger.close(sequence.lease)
        return token

    def sit(self, seat: int, truth: list[int]) -> Sequence:
        request = Request(np.array(truth, np.int32), SamplingParams(max_tokens=1))
        sequence = Sequence(self.number, request, 1, 0, PrefixIdentity(self.spec.cell))
        sequence.seat = seat
        sequence.lease = self.ledger.open(seat, sequence.keys, len(truth), len(truth) - 1)
        return sequence

    def step(self, sequence: Sequence, start: int, end: int, accepted: int) -> int:
        certain = accepted - self.random.randint(0, accepted - start)
        assert self.ledger.advance(sequence.lease, end, certain) is not None
        grant = self.ledger.snapshot([sequence.lease])[sequence.seat]
        rows = StepBuilder(prefills=[(sequence, start, end, True)], grants={sequence.seat: grant})
        self.number += 1
        by_seat: list[Sequence | None] = [None] * 4
        by_seat[sequence.seat] = sequence
        step = assemble(self.number, rows, by_seat, self.ledger, self.choices)
        check_plan(step.plan, self.ledger)
        landing = self.device.execute(step.plan)
        self.ledger.settle(sequence.lease, grant, accepted)
        audit(self.ledger)
        return int(landing.tokens[0])

    def reread(self, sequence: Sequence, truth: list[int]) -> int:
        self.ledger.close(sequence.lease)
        again = self.sit(sequence.seat, truth)
        start = int(self.ledger.planned[sequence.seat])
        token = self.step(again, start, len(truth), accepted=len(truth))
        self.ledger.close(again.lease)
        return token


@pytest.mark.parametrize("part", parts(6))
def test_rejected_drafts_leave_no_trace(part: int) -> None:
    @thorough(EXAMPLES // 3)
    @given(seed=st.integers(0, 1 << 40))
    def check(seed: int) -> None:
        check_drafts(seed * PARTS + part)

    check()


def check_drafts(seed: int) -> None:
    random = Random(seed)
    driver = Speculator(random, room=random.randint(1, 6))
    stem = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 20))]
    for _ in range(4):
        fresh = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 30))]
        truth = stem[: random.randint(0, len(stem))] + fresh
        assert driver.run_sequence(random.randrange(4), truth) == oracle(driver.spec, truth, 1)[0]
        stem = truth
    driver.ledger.cache.clear()
    assert driver.ledger.arena.used_slabs == 0
