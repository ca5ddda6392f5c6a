"""Rows that leave an MTP head at any time and come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from tests.support.drafting.following import following_workload
from tests.support.drafting.heads import HEAD, CheckedHead, Head, Lengths, Target
from tests.support.drafting.turning_down import Dear
from tests.support.hashed.rolling import VOCABULARY, rolling_spec
from tests.support.hashed.workloads import Arrival, Run, Workload, check_answers, drive, tight_memory
from weft.base.config import EngineConfig
from weft.base.plan import Plan
from weft.drafting.head import DraftHead
from weft.drafting.model import DecodedDrafts
from weft.drafting.policy.choosing import Drafting, SequenceDrafts
from weft.drafting.state_lines import StateLines
from weft.engine.loop import Engine
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.runner.hidden_states import HiddenStates

# Tokens that wait to be read, and those of an answer.
OFTEN, LENGTH = 4, 40


class WatchedLines(StateLines):
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
    """After a row has left, nothing of it is here, and nothing of it is computed. Drafts are judged without a wait."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.left: set[SequenceDrafts] = set()
        self.wrong = 1.0
        # The chance of a row to leave in a step, and the last plan before the guesses that are not judged yet.
        self.losing = 0.0
        self.read_after = 0

    def abandon(self, seat, sequence):
        self.checked["left with drafts in flight"] += self.has_drafts_in_flight(seat, sequence)
        super().abandon(seat, sequence)
        self.left.add(sequence.drafting)
        self.checked["left"] += 1

    def follow(self, by_seat):
        for seat in list(self._open):
            if self.random.random() < self.losing:
                self.abandon(seat, by_seat[seat])
        unjudged = self._unjudged
        super().follow(by_seat)
        if self._unjudged is not unjudged and self._unjudged is not None:
            self.read_after = self.engine.planner.number
        for seat, sequence in enumerate(by_seat):
            if sequence is None or sequence.drafting is None or sequence.drafting.model is None:
                assert seat not in self._open, "a row without the head holds a lease"
                assert self.hidden.end[seat] == 0, "states of a row without the head are kept"
        assert set(self.ledger.leases) == set(self._open)

    def begin(self, asked, unverified=None):
        found = super().begin(asked, unverified)
        if found is None:
            return None
        return DecodedDrafts(found.counts, lambda: self.landed(found))

    def landed(self, guesses):
        """Return guesses of a reading, or those of drafts, which nothing waits for here."""
        if self._judging:
            self.checked["judged"] += len(guesses.counts)
            assert self.engine.planner.landed > self.read_after, "the host waits for guesses"
        return guesses.tokens()

    def judge(self):
        self._judging = True
        super().judge()
        self._judging = False

    _judging = False

    def launch(self, seat, *more):
        for each in seat.tolist():
            drafts = self.engine.planner.by_seat[each].drafting
            assert drafts not in self.left, "the head computes a row that has left"
            assert drafts.model is not None, "the head computes a row without it"
            self.checked["computed"] += 1
        return super().launch(seat, *more)


def engine_of(workload: Workload, seed: int, drafting: Drafting, room: float = 1.5) -> tuple[Run, WatchedHead]:
    config, spec = workload.config, workload.spec
    answers = {tuple(a.prompt): a.answer(spec) for a in workload.arrivals}
    lines = WatchedLines(config.max_sequences, 4 * config.max_tokens_per_step)
    target = Target(HiddenStates(lines, 1, torch.int64), spec, config.memory_bytes, config.max_sequences, workload.lazy)
    own = replace(HEAD, draft_room=spec.draft_room)
    memory = tight_memory(own, workload.arrivals, room)
    ledger = Ledger(own, memory, config.max_sequences, config.max_length + 8, cache=config.cache, remember_freed=True)
    head = WatchedHead(answers, seed, lines, ledger, Head(target, memory), VOCABULARY, 64)
    engine = Engine(spec, target, config, drafting=drafting, draft_model=head)
    head.engine = lines.engine = engine
    return Run(engine, target), head


def drive_and_check(workload: Workload, run: Run, head: WatchedHead) -> None:
    drive(workload, run)
    check_answers(workload, run)
    assert not head.ledger.leases
    head.flush()
    assert head.ledger.arena.used_slabs == 0, "something of the head is still owned"
    assert not head.hidden.kept_for.any()
    assert not head.hidden.end.any()


def check_leaving_at_any_time(seed: int, count: int = 4) -> Counter[str]:
    workload = following_workload(seed, count)
    run, head = engine_of(workload, seed, Lengths(workload.spec.draft_room, seed))
    head.wrong, head.losing = 0.2, 0.06
    drive_and_check(workload, run, head)
    return head.checked + Counter({"preempted": run.engine.planner.preemptions})


def stream(spec: MemorySpec, requests: int, depth: int, shared: int = 0, every: int = LENGTH + 8) -> Workload:
    """Requests of the same length, four at a time, whose prompts may share a prefix."""
    arrivals = [
        Arrival([*[2] * shared, 1 + number, 3, 5, 7, 11], LENGTH, every * (number // 4), None, b"", 0, (), frozenset())
        for number in range(requests)
    ]
    length = LENGTH + shared + 24
    config = EngineConfig(memory_bytes=1 << 22, max_sequences=4, max_length=length, max_tokens_per_step=32, depth=depth)
    return Workload(spec, arrivals, config, True)


def check_guesses_are_judged_though_prompts_are_read_in_every_step() -> None:
    workload = stream(rolling_spec(cell=HEAD.cell, room=3), 40, depth=1, every=4)
    run, head = engine_of(workload, 1, Drafting(3, costs=Dear(), model=DraftHead.name), room=8.0)
    drive_and_check(workload, run, head)
    assert head.checked["judged"] > 20
