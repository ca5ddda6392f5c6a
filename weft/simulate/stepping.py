"""The planner in strides: it decides like the engine's, but a step without prompts decodes many tokens at once.

Builds no tensor plans, since no device runs them: a step is which sequences compute how much. With a stride of one it
is the engine's planner, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft.base.config import EngineConfig
from weft.base.grid import floor_to_grid
from weft.base.sampling import SamplingParams
from weft.engine.assembly import StepBuilder
from weft.engine.events import FinishReason, Report
from weft.engine.planner import Planner
from weft.engine.sequence import Sequence
from weft.engine.tracing.events import Wait
from weft.memory.keys import Key
from weft.memory.lease import Grant, Lease
from weft.memory.ledger import Ledger
from weft.memory.misses import Miss
from weft.simulate.sessions import SimulatedSession
from weft.simulate.text import SimulatedRequest


class Asked:
    """The planner's view of a request, from the simulation's own requests."""

    __slots__ = ("boundaries", "params", "priority", "prompt", "salt", "snapshots")

    PARAMS = SamplingParams(max_tokens=1)
    send_to = None
    retain = ()
    answered = None

    def __init__(self, ask: SimulatedRequest) -> None:
        self.prompt = range(ask.prompt)  # only its length is used
        self.params = self.PARAMS
        self.priority = 0
        self.salt = b""
        self.snapshots = ask.declared
        self.boundaries = ask.boundaries


class Simulated:
    """A sequence without tokens; it replaces the engine's `Sequence`."""

    # As of requests that fork nothing and keep no answer for others.
    shares_answer = False

    __slots__ = (
        "arrival",
        "arrived_seconds",
        "ask",
        "awaits_mask",
        "constraint",
        "declared",
        "drafting",
        "first_seconds",
        "fresh_starts",
        "generated",
        "id",
        "keys",
        "known",
        "lease",
        "leaving",
        "max_tokens",
        "miss",
        "plain_key",
        "reason",
        "report",
        "request",
        "seat",
        "session",
        "waited_since",
        "waits_for",
    )

    def __init__(self, number: int, ask: SimulatedRequest, session: SimulatedSession, now: float) -> None:
        self.id = self.arrival = number
        self.ask = ask
        self.session = session
        self.arrived_seconds = now
        self.first_seconds: float | None = None
        self.request = Asked(ask)
        self.keys: list[Key] = ask.keys
        self.plain_key: Key | None = None
        self.declared = ask.declared
        self.known = range(ask.prompt)
        self.generated = range(0)
        self.max_tokens = ask.answer
        self.constraint = None
        self.awaits_mask = False
        self.drafting = None
        self.lease: Lease | None = None
        self.miss: Miss | None = None
        self.seat = 0
        self.leaving = False
        self.reason: FinishReason | None = None
        self.report = Report()
        self.waited_since = 0
        self.waits_for = Wait.TURN
        self.fresh_starts = 0

    @property
    def rank(self) -> tuple[int, int]:
        return 0, self.arrival

    @property
    def reuse_limit(self) -> int:
        return len(self.known) - 1

    def note_load(self) -> None:
        self.waits_for = Wait.LOAD

    def note_start(self, miss: Miss) -> Miss:
        self.miss = miss
        return miss

    def go_back(self) -> None:
        self.lease = None
        self.leaving = False
        self.known = range(self.ask.prompt + len(self.generated))
        self.report.preemptions += 1


def for_planner(sequence: Simulated) -> Sequence:
    """Return a simulated sequence as the planner takes it: it has every attribute that the planner uses."""
    return cast(Sequence, sequence)


def from_planner(sequence: Sequence | None) -> Simulated:
    """Return a sequence of the planner, which holds only simulated ones here."""
    return cast(Simulated, sequence)


class NoSampling:
    """Replaces the sampling parameters: the simulation samples nothing."""

    def __init__(self, seats: int) -> None:
        self.constrained = np.zeros(seats, np.bool_)

    def sit(self, sequence: Simulated) -> None:
        pass


@dataclass(slots=True)
class Stride(StepBuilder):
    """A step: rows of the planner, and how many tokens each decode computes."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    decoders: list[Simulated] = field(default_factory=list)
    strides: int = 1

    @property
    def tokens(self) -> int:
        return len(self.decode_seats) + sum(end - start for _, start, end, _ in self.prefills)


class StridingPlanner(Planner):
    """`stride` is how many tokens a decode may take in the next step; the simulation sets it."""

    def __init__(self, ledger: Ledger, config: EngineConfig) -> None:
        super().__init__(ledger, config)
        self.sampling = NoSampling(config.max_sequences)  # type: ignore[assignment]  # the planner only seats sequences there
        self.stride = 1

    def plan(self) -> Stride | None:  # type: ignore[override]  # a step without a plan for a device
        rows, preemptions = Stride(), self.preemptions
        self._short = False
        self._plan_decodes(rows)
        limit = self.config.max_tokens_per_step
        if self.prefilling:
            self._plan_prefills(rows, limit, 1)
        if self.stride == 1 and not self.leaving and self.preemptions == preemptions and len(self.queue):
            self._admit(rows, limit, 1)
        if self.stride == 1:
            self._look_ahead()
        if not rows.tokens:
            return None
        self._take_snapshots(rows)
        self.number += 1
        if len(rows.decode_seats):
            self._last_plan[rows.decode_seats] = self.number
            self._left[rows.decode_seats] -= rows.counts
        for sequence, _, _, samples in rows.prefills:
            self._last_plan[sequence.seat] = self.number
            self._left[sequence.seat] -= samples
        return rows

    def _plan_decodes(self, rows: Stride) -> None:  # type: ignore[override]  # only `plan` calls it
        if not self.decoding:
            return
        if self._decode_seats is None:
            self._decode_seats = np.array([s.seat for s in self.decoding], np.int64)
        ledger, cell = self.ledger, self.ledger.spec.cell
        seats = self._decode_seats
        counts = np.minimum(self._left[seats], self.stride)
        offset = ledger.planned[seats] % cell
        needy = (offset == 0) | (offset + counts >= cell)
        plain, granted = seats[~needy], []
        if needy.any():
            preempted = self.preemptions
            granted = self._grant_strides(seats[needy].tolist(), counts[needy].tolist(), rows)
            if self.preemptions > preempted or self.leaving:
                plain = np.array([s for s in plain.tolist() if self._runs(s)], np.int64)
        rows.counts = np.concatenate([np.minimum(self._left[plain], self.stride), [n for _, n in granted]]).astype(int)
        rows.decode_seats = np.concatenate([plain, np.array([s for s, _ in granted], np.int64)])
        ledger.planned[plain] += rows.counts[: len(plain)]
        rows.decode_starts = ledger.planned[rows.decode_seats] - rows.counts
        rows.decoders = [from_planner(self.by_seat[seat]) for seat in rows.decode_seats.tolist()]

    def _grant_strides(self, seats: list[int], counts: list[int], rows: Stride) -> list[tuple[int, int]]:
        granted = []
        found = [(from_planner(self.by_seat[seat]), count) for seat, count in zip(seats, counts, strict=True)]
        for simulated, count in sorted(found, key=lambda each: each[0].rank):
            sequence = for_planner(simulated)
            if self._runs(sequence.seat) and self.by_seat[sequence.seat] is sequence:
                start = int(self.ledger.planned[sequence.seat])
                least = min(start + count, floor_to_grid(start, self.ledger.spec.cell) + self.ledger.spec.cell)
                grant = self._advance(sequence, start + count, least, rows)
                if grant is not None:
                    granted.append((sequence.seat, grant.end - start))
        return granted


def settle(planner: StridingPlanner, step: Stride) -> list[Simulated]:
    """Settle a landed step: publish what it computed; return the finished sequences, in the order of the rows."""
    ledger = planner.ledger
    planner.landed = planner.number
    if len(step.decode_seats):
        ledger.computed[step.decode_seats] = step.decode_starts + step.counts
    for seat, grant in step.grants.items():
        _settle_one(planner, seat, grant)
    done = []
    for sequence, count in zip(step.decoders, step.counts.tolist(), strict=True):
        sequence.generated = range(len(sequence.generated) + count)
        if len(sequence.generated) >= sequence.max_tokens:
            done.append(sequence)
    for planned, _, _, samples in sorted(step.prefills, key=lambda row: row[2] - row[1] > 1):
        if samples:
            sequence = from_planner(planned)
            sequence.generated = range(len(sequence.generated) + 1)
            if len(sequence.generated) >= sequence.max_tokens:
                done.append(sequence)
    return done


def _settle_one(planner: StridingPlanner, seat: int, grant: Grant) -> None:
    sequence = planner.by_seat[seat]
    assert sequence is not None
    assert sequence.lease is not None
    planner.ledger.settle(sequence.lease, grant, grant.end)
