"""The rolling-hash device with areas of host memory, and a wire between two of them that does its worst.

Units are read from the staging area, written into arrivals, lost, repeated, reordered and damaged at random moments.
The wire accepts units by the same rules as the transport over sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tests.rolling import POISON, RollingDevice, RoundingDevice
from tests.workloads import Workload
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction
from weft.base.plan import Landing, Plan
from weft.base.transfers import (
    Destination,
    Granted,
    Offer,
    Offered,
    ReceivingEnded,
    ReservedUnit,
    SendingEnded,
    StagedUnit,
    TransferEvent,
    UnitReceived,
    UnitsSent,
)
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk_format import UnitHeader, checksum, decode
from weft.memory.tiers.sent_units import header_of_staged, misplaced

THERE = Destination("decode", 1)


@dataclass
class CopyTicket:
    plan: CopyPlan
    executed: bool = False


class AreaDevice(RollingDevice):
    """The rolling-hash device with areas of host memory below it, one for each size. Copies land at random moments."""

    def __init__(self, workload: Workload, config: EngineConfig, sizes: Sequence[int], random: Random) -> None:
        super().__init__(workload.spec, config.memory_bytes, config.max_sequences, workload.lazy)
        bytes_of = unit_bytes(workload.spec)
        self.areas = [
            {
                kind: np.full((size // bytes_of[kind], self.memory[kind].shape[1]), POISON, np.uint64)
                for kind in bytes_of
                if kind is not Kind.TAIL
            }
            for size in sizes
        ]
        self.load_bytes_per_second: float | None = None
        self.random = random
        self.patience = random.choice([0.05, 0.5, 1.0])
        self.queues: dict[tuple[int, Direction], deque[CopyTicket]] = {}

    def copy(self, plan: CopyPlan) -> CopyTicket:
        ticket = CopyTicket(plan)
        if plan.after_steps:
            self.execute_all()
        self.queues.setdefault((plan.level, plan.direction), deque()).append(ticket)
        self.progress()
        return ticket

    def copied(self, ticket: CopyTicket, wait: bool) -> float | None:
        if not wait and self.random.random() > self.patience:
            self.progress()
            return None
        while not ticket.executed:
            self.execute_copy(ticket.plan.level, ticket.plan.direction)
        return 1e-6

    def progress(self) -> None:
        for (level, direction), queue in self.queues.items():
            if queue and self.random.random() < self.patience / 2:
                self.execute_copy(level, direction)

    def execute_copy(self, level: int, direction: Direction) -> None:
        ticket = self.queues[level, direction].popleft()
        for kind, upper, lower, count in ticket.plan.runs():
            device, area = self.memory[Kind(kind)], self.areas[level][Kind(kind)]
            if direction is Direction.SAVE:
                area[lower : lower + count] = device[upper : upper + count]
            else:
                device[upper : upper + count] = area[lower : lower + count]
        ticket.executed = True

    def launch(self, plan: Plan) -> dict:
        self.progress()
        return super().launch(plan)

    def execute(self, plan: Plan) -> Landing:
        landing = super().execute(plan)
        self.progress()
        return landing

    def close(self) -> None:
        pass


class RoundingAreaDevice(AreaDevice, RoundingDevice):
    """The same, with results that depend on how a token is computed."""


@dataclass(frozen=True)
class Faults:
    """Chances, for each unit that is sent, or for each transfer and turn of the wire (`cut`)."""

    lost: float = 0.0
    repeated: float = 0.0
    damaged: float = 0.0
    cut: float = 0.0
    reordered: bool = False


@dataclass
class Travel:
    """One transfer on the wire."""

    number: int
    offer: Offer
    staged: list[StagedUnit] = field(default_factory=list)  # not read yet
    flying: list[tuple[bytes, np.ndarray]] = field(default_factory=list)  # header and values
    granted: dict[int, ReservedUnit] = field(default_factory=dict)
    finished: bool = False
    ended: bool = False
    age: int = 0


class Wire:
    """Both ends of a transport. `send_events` are for the prefill engine, `receive_events` for the decode engine."""

    def __init__(self, spec: MemorySpec, random: Random, faults: Faults) -> None:
        self.spec = spec
        self.random = random
        self.faults = faults
        self.source: dict[Kind, np.ndarray] = {}
        self.target: dict[Kind, np.ndarray] = {}
        self.owners: dict[Kind, dict[int, int]] = {}  # of the units of arrivals
        self.source_owners: dict[Kind, dict[int, int]] = {}  # of the units of the staging area
        self.travels: dict[int, Travel] = {}
        # The offers that requests allow: keys under their own salt, and the digest of their own tenant.
        self.allowed: set[Offer] = set()
        self.send_events: list[TransferEvent] = []
        self.receive_events: list[TransferEvent] = []
        self.confirmed = 0

    @property
    def busy(self) -> bool:
        return bool(self.travels or self.send_events or self.receive_events)

    def sizes(self) -> dict[Kind, int]:
        return {kind: area.shape[1] * 8 for kind, area in self.target.items()}

    def turn(self) -> None:
        """Let a little happen. Whatever the wire may still write must belong to a transfer."""
        for travel in self.travels.values():
            for place in travel.granted.values():
                assert place.unit in self.owners[Kind(place.kind)], "a unit was freed that the wire may still write"
        for travel in list(self.travels.values()):
            travel.age += 1
            if travel.ended:
                self._bury(travel)
            elif self.random.random() < self.faults.cut or travel.age > 400:
                travel.ended = True
            else:
                self._move(travel)

    def _move(self, travel: Travel) -> None:
        for _ in range(self.random.randint(0, 3)):
            if travel.staged and self.random.random() < 0.6:
                self.read(travel)
            if travel.flying and self.random.random() < 0.6:
                self._deliver(travel)

    def read(self, travel: Travel) -> None:
        """Read a staged unit, after which its memory may be used again."""
        unit = travel.staged.pop(0)
        self.send_events.append(UnitsSent(travel.number, (unit,)))
        self.take(travel, unit)

    def take(self, travel: Travel, unit: StagedUnit) -> None:
        values = self.source[Kind(unit.kind)][unit.unit].copy()
        header = header_of_staged(unit, values.tobytes())
        if self.random.random() < self.faults.lost:
            return
        if self.random.random() < self.faults.damaged:
            values[self.random.randrange(len(values))] ^= np.uint64(1 << 40)
        for _ in range(1 + (self.random.random() < self.faults.repeated)):
            travel.flying.append((header.encode(), values))

    def _deliver(self, travel: Travel) -> None:
        index = self.random.randrange(len(travel.flying)) if self.faults.reordered else 0
        entry, values = travel.flying.pop(index)
        header = decode(entry)
        assert header is not None
        if misplaced(header, travel.granted, self.sizes()) is not None:
            # A repeated unit has lost its place.
            travel.ended = True
            return
        place = travel.granted.pop(header.unit)
        values = self.fetch(travel, header) if not len(values) else values
        self.target[Kind(place.kind)][place.unit] = values
        if checksum(values.tobytes()) != header.checksum:
            travel.ended = True
            return
        self.accepted(travel, header)
        self.receive_events.append(UnitReceived(travel.number, header.unit))

    def fetch(self, travel: Travel, header: UnitHeader) -> np.ndarray:
        raise NotImplementedError("units carry their values")

    def accepted(self, travel: Travel, header: UnitHeader) -> None:
        pass

    def forget(self, travel: Travel) -> None:
        pass

    def _bury(self, travel: Travel) -> None:
        if self.random.random() < 0.8:
            # Late writes into memory that was not given back.
            for place in travel.granted.values():
                self.target[Kind(place.kind)][place.unit] = POISON
            return
        del self.travels[travel.number]
        self.forget(travel)
        self.send_events.append(SendingEnded(travel.number, None if travel.finished else "the wire broke"))
        self.receive_events.append(ReceivingEnded(travel.number))


class PullingWire(Wire):
    """The same, but the receiver reads units out of the staging area, as NIXL does: later than they are announced."""

    def __init__(self, spec: MemorySpec, random: Random, faults: Faults) -> None:
        super().__init__(spec, random, faults)
        self.announced: dict[int, list[StagedUnit]] = {}

    def turn(self) -> None:
        for units in self.announced.values():
            for unit in units:
                assert unit.unit in self.source_owners[Kind(unit.kind)], "a unit was freed that may still be read"
        super().turn()

    def read(self, travel: Travel) -> None:
        """Announce a unit. Its memory may be used again when it was read."""
        unit = travel.staged.pop(0)
        header = header_of_staged(unit, self.source[Kind(unit.kind)][unit.unit].tobytes())
        self.announced.setdefault(travel.number, []).append(unit)
        for _ in range(1 + (self.random.random() < self.faults.repeated)):
            travel.flying.append((header.encode(), np.zeros(0)))

    def fetch(self, travel: Travel, header: UnitHeader) -> np.ndarray:
        """Read the unit of a place now."""
        unit = next(unit for unit in self.announced[travel.number] if unit.place == header.unit)
        values = self.source[header.kind][unit.unit].copy()
        assert checksum(values.tobytes()) == header.checksum, "a unit has changed before it was read"
        if self.random.random() < self.faults.damaged:
            values[self.random.randrange(len(values))] ^= np.uint64(1 << 40)
        return values

    def accepted(self, travel: Travel, header: UnitHeader) -> None:
        """Tell the sender that a unit was taken."""
        units = self.announced[travel.number]
        unit = next(unit for unit in units if unit.place == header.unit)
        units.remove(unit)
        self.send_events.append(UnitsSent(travel.number, (unit,)))

    def forget(self, travel: Travel) -> None:
        self.announced.pop(travel.number, None)


class SendingEnd:
    """The prefill engine's end."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.wake: Callable[[], None] = lambda: None
        self.send_bytes_per_second: float | None = None
        self.send_seconds = 0.0

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        assert destination == THERE
        assert offer in self.wire.allowed, "a prefix is offered under the salt or tenant of another request"
        self.wire.travels[transfer] = Travel(transfer, offer)
        self.wire.receive_events.append(Offered(transfer, offer))

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        if transfer in self.wire.travels:
            self.wire.travels[transfer].staged += units

    def finish(self, transfer: int) -> None:
        pass

    def abandon(self, transfer: int) -> None:
        if transfer in self.wire.travels:
            self.wire.travels[transfer].ended = True

    def poll(self) -> list[TransferEvent]:
        self.wire.turn()
        events, self.wire.send_events = self.wire.send_events, []
        return events

    def wait(self, seconds: float) -> None:
        self.wire.turn()

    def close(self) -> None:
        pass


class ReceivingEnd:
    """The decode engine's end."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.wake: Callable[[], None] = lambda: None
        self.send_bytes_per_second: float | None = None
        self.send_seconds = 0.0

    def grant(self, transfer: int, first: int, end: int, point: bool, units: Sequence[ReservedUnit]) -> None:
        travel = self.wire.travels.get(transfer)
        if travel is not None and not travel.ended:
            travel.granted |= {unit.place: unit for unit in units}
            self.wire.send_events.append(Granted(transfer, first, end, point))

    def confirm(self, transfer: int) -> None:
        travel = self.wire.travels.get(transfer)
        if travel is not None and not travel.ended:
            travel.finished = travel.ended = True
            self.wire.confirmed += 1

    def refuse(self, transfer: int, reason: str) -> None:
        if transfer in self.wire.travels:
            self.wire.travels[transfer].ended = True

    def poll(self) -> list[TransferEvent]:
        self.wire.turn()
        events, self.wire.receive_events = self.wire.receive_events, []
        return events

    def wait(self, seconds: float) -> None:
        self.wire.turn()

    def close(self) -> None:
        pass
