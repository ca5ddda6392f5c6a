"""Rows leave an MTP head that is hardly ever right, and new rows use it again once it is.

Target and head are the rolling-hash devices of `test_head_following`, which compare every guess with that of a fresh
head. What the target gets in place of the guesses is wrong as often as a test says. Costs are a formula, so nothing
depends on a clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rolling import VOCABULARY, rolling_spec
from tests.test_following import following_workload
from tests.test_head_following import HEAD, Awake, CheckedHead, Head, Lengths, Target
from tests.test_properties import thorough
from tests.test_turning_down import Dear
from tests.workloads import Arrival, Run, Workload, check_answers, drive, tight_memory
from weft.base.config import EngineConfig
from weft.base.plan import Plan
from weft.engine import draft_head
from weft.engine.draft_head import DraftHead
from weft.engine.loop import Engine
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.runner.hidden_states import HiddenStates
from weft.speculate import drafting as drafting_module
from weft.speculate.acceptance import LEAST_RATE, MEMORY_OF_ALL, Acceptance
from weft.speculate.costs import FreeDrafts
from weft.speculate.drafting import PRIORS, Drafting, Proposal, SequenceDrafts

PRIOR = PRIORS[DraftHead.name]
# Tokens that wait to be read, one in how many sequences is a scout, and tokens of an answer.
OFTEN, SCOUTS, LENGTH = 4, 4, 40


class WatchedStates(HiddenStates):
    """Keeps the states of rows that the head reads, and of no others."""

    engine: Engine

    def place(self, plan: Plan) -> np.ndarray:
        lines = super().place(plan)
        sequences = (self.engine.planner.by_seat[seat] for seat in plan.seat.tolist())
        without = [s.drafting is None or s.drafting.model is None for s in sequences]
        others = lines[np.repeat(without, plan.end - plan.start)]
        assert (others == self.padding).all(), "states of a row without the head are kept"
        return lines


class WatchedHead(CheckedHead):
    """After a row has left, nothing of it is here, and nothing of it is computed."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.left: set[SequenceDrafts] = set()
        self.wrong = 1.0

    def abandon(self, seat, sequence):
        self.checked["left with drafts in flight"] += self.has_drafts_in_flight(seat, sequence)
        super().abandon(seat, sequence)
        self.left.add(sequence.drafting)
        self.checked["left"] += 1

    def follow(self, by_seat):
        super().follow(by_seat)
        for seat, sequence in enumerate(by_seat):
            if sequence is None or sequence.drafting is None or sequence.drafting.model is None:
                assert seat not in self._open, "a row without the head holds a lease"
                assert self.hidden.end[seat] == 0, "states of a row without the head are kept"
        assert set(self.ledger.leases) == set(self._open)

    def launch(self, seat, *more):
        for each in seat.tolist():
            drafts = self.engine.planner.by_seat[each].drafting
            assert drafts not in self.left, "the head computes a row that has left"
            assert drafts.model is not None, "the head computes a row that began without it"
            self.checked["computed"] += 1
        return super().launch(seat, *more)


class Watched(Drafting):
    """Remembers all sequences, and which of them began with the head."""

    def __init__(self, most: int, costs: FreeDrafts) -> None:
        super().__init__(most, costs=costs, model=DraftHead.name)
        self.begun: list[tuple[SequenceDrafts, bool]] = []

    def begin(self, *args):
        found = super().begin(*args)
        self.begun.append((found, found.model is not None))
        return found


class Fickle(Awake):
    """Leaves the head at any time."""

    random: Random

    @property
    def leaves_model(self) -> bool:
        return self.model is not None and self.random.random() < 0.06


class FickleLengths(Lengths):
    """Drafts of random lengths in every step."""

    def begin(self, prompt, salt, most, prediction, grammar=None):
        found = Fickle(prompt, salt, self.most, suffixes=False, overall=self.overall, model=self.model)
        found.random = self.random
        return found


def engine_of(workload: Workload, seed: int, drafting: Drafting, room: float = 1.5) -> tuple[Run, WatchedHead]:
    config, spec = workload.config, workload.spec
    answers = {tuple(a.prompt): a.answer(spec) for a in workload.arrivals}
    states = WatchedStates(config.max_sequences, 4 * config.max_tokens_per_step, 1, torch.int64)
    target = Target(states, spec, config.memory_bytes, config.max_sequences, workload.lazy)
    own = replace(HEAD, draft_room=spec.draft_room)
    memory = tight_memory(own, workload.arrivals, room)
    ledger = Ledger(own, memory, config.max_sequences, config.max_length + 8, cache=config.cache, remember_freed=True)
    head = WatchedHead(answers, seed, states, ledger, Head(target, memory), VOCABULARY, 64)
    engine = Engine(spec, target, config, drafting=drafting, draft_model=head)
    head.engine = states.engine = engine
    return Run(engine, target), head


def drive_and_check(workload: Workload, run: Run, head: WatchedHead) -> None:
    drive(workload, run)
    check_answers(workload, run)
    assert not head.ledger.leases
    head.flush()
    assert head.ledger.arena.used_slabs == 0, "something of the head is still owned"
    assert not head.hidden.keeps.any()
    assert not head.hidden.end.any()


def check_leaving_at_any_time(seed: int, count: int = 4) -> Counter[str]:
    workload = following_workload(seed, count)
    drafting = FickleLengths(workload.spec.draft_room, seed)
    run, head = engine_of(workload, seed, drafting)
    head.wrong = 0.2
    drive_and_check(workload, run, head)
    return head.checked + Counter({"preempted": run.engine.planner.preemptions})


def check_head_that_becomes_right(seed: int, count: int = 6) -> Counter[str]:
    """The head is never right in the first half of the requests, and always in the second."""
    workload, random = following_workload(seed, count), Random(f"leaving {seed}")
    drafting = Watched(workload.spec.draft_room, random.choice([Dear, FreeDrafts])())
    run, head = engine_of(workload, seed, drafting)
    # A few guesses are enough here.
    drafting.overall[DraftHead.name] = Acceptance(random.choice([0.02, 0.04, 0.04, 0.6]), memory=MEMORY_OF_ALL)
    begin = drafting.begin

    def begun(*args):
        head.wrong = 1.0 if len(drafting.begun) < count // 2 else 0.0
        return begin(*args)

    drafting.begin = begun
    drive_and_check(workload, run, head)
    met = Counter({"without": sum(not with_head for _, with_head in drafting.begun)})
    return met + head.checked + Counter({"accepted": drafting.counts.accepted.total()})


@pytest.fixture(autouse=True)
def learns_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "FOLLOWED_AT_ONCE", OFTEN)
    monkeypatch.setattr(drafting_module, "SCOUTS", SCOUTS)


def test_answers_are_the_undrafted_ones_whichever_rows_leave_and_when() -> None:
    @thorough(20)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 6))
    def check(seed: int, count: int) -> None:
        check_leaving_at_any_time(seed, count)
        check_head_that_becomes_right(seed, count)

    check()


def test_rows_leave_at_all_times() -> None:
    met: Counter[str] = Counter()
    for seed in range(12):
        met += check_leaving_at_any_time(seed) + check_head_that_becomes_right(seed)
    print(met)
    least = {"left": 15, "left with drafts in flight": 3, "without": 8, "preempted": 2, "accepted": 100}
    for name, count in least.items():
        assert met[name] >= count, met


def stream(spec: MemorySpec, requests: int, depth: int) -> Workload:
    """Requests of the same length, four at a time."""
    arrivals = [
        Arrival([1 + number, 3, 5, 7, 11], LENGTH, (LENGTH + 8) * (number // 4), None, b"", 0, (), frozenset())
        for number in range(requests)
    ]
    config = EngineConfig(memory_bytes=1 << 22, max_sequences=4, max_length=64, max_tokens_per_step=32, depth=depth)
    return Workload(spec, arrivals, config, True)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_head_that_is_never_right_is_read_by_scouts_only_until_it_is_right(depth: int) -> None:
    wrong, all_ = 7 * SCOUTS, 15 * SCOUTS
    workload = stream(rolling_spec(cell=HEAD.cell, room=3), all_, depth)
    drafting = Watched(3, Dear())
    run, head = engine_of(workload, 1, drafting, room=8.0)
    begin, computed, proposed = drafting.begin, list[int](), list[int]()

    def begun(*args):
        head.wrong = 1.0 if len(drafting.begun) < wrong else 0.0
        computed.append(head.checked["computed"])
        proposed.append(drafting.counts.proposed.total())
        return begin(*args)

    drafting.begin = begun
    drive_and_check(workload, run, head)
    with_head = [began for _, began in drafting.begun]
    learned = with_head.index(False)
    assert learned <= 2 * SCOUTS
    for number in range(learned, wrong):
        assert with_head[number] == (number % SCOUTS == 0)
    assert head.left, "rows that were there when it was learned have left"
    assert not any(drafts.model for number, (drafts, _) in enumerate(drafting.begun[:wrong]) if number % SCOUTS)
    first, last = learned + SCOUTS, wrong - SCOUTS
    assert proposed[last] == proposed[first], "scouts are read, and draft nothing"
    assert 0 < computed[last] - computed[first] <= (last - first) / SCOUTS * (LENGTH / OFTEN + 2)
    # Scouts show that it is right again. Then all rows begin with it.
    again = wrong + next(place for place in range(all_) if all(with_head[wrong + place :]))
    assert again <= wrong + 4 * SCOUTS
    assert drafting.counts.accepted.total() > 0.5 * LENGTH * (all_ - again)


def note(acceptance: Acceptance, chance: float, random: Random) -> bool:
    acceptance.note(1, int(random.random() < chance))
    return acceptance.rate(0) < LEAST_RATE


def test_bad_luck_does_not_turn_a_head_off() -> None:
    new, misses = Acceptance(PRIOR, memory=MEMORY_OF_ALL), 1
    while not note(new, 0.0, Random(1)):
        misses += 1
    assert 0.5**misses < 1e-10
    assert misses == 37
    for seed in range(10):
        # It pays with few rows, and often it is not chosen with many.
        acceptance, random = Acceptance(PRIOR, memory=MEMORY_OF_ALL), Random(seed)
        assert not any(note(acceptance, 0.3, random) for _ in range(2000))
    # Of a head that was right, and never is again: how many guesses it takes to see that, and later the contrary.
    assert sum(not note(acceptance, 0.0, random) for _ in range(2000)) < 1300
    assert sum(note(acceptance, 0.6, random) for _ in range(200)) < 60


def test_a_row_in_which_the_head_is_right_keeps_it_though_all_others_leave() -> None:
    drafting = Drafting(3, model=DraftHead.name)
    scout, good, bad = (drafting.begin(np.ones(4, np.int32), b"", None, None) for _ in range(3))
    guess = Proposal(DraftHead.name, DraftHead.name, (5,), (0.5,))
    for number in range(200):
        drafting.learn(bad, guess, 0)
        drafting.learn(scout, guess, 0)
        if number % 20 == 0:
            drafting.learn(good, guess, 1)
        drafting.learn(good, guess, 0)
        drafting.learn(bad, guess, 0)
    for _ in range(100):
        drafting.learn(bad, guess, 0)
    assert drafting.overall[DraftHead.name].rate(0) < LEAST_RATE
    assert [each.leaves_model for each in (scout, good, bad)] == [False, False, True]
    answer = [1, 2, 3]
    assert good.propose(answer, 3, drafting.shared).drafter == DraftHead.name
    assert scout.propose(answer, 3, drafting.shared) is None, "it is read, and asked for nothing"
    assert drafting.begin(np.ones(4, np.int32), b"", None, None).model is None
