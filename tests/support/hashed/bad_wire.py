"""The rolling-hash device with areas of host memory, and a wire between two of them that does its worst.

Units are read from the staging area, written into arrivals, lost, repeated, reordered and damaged at random moments,
whole or in pieces. The wire accepts them by the same rules as the transport over sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from tests.support.hashed.rolling import POISON, RollingDevice, RoundingDevice
from tests.support.hashed.workloads import Workload
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction, UnitPiece
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
from weft.memory.spec import AttentionMemory, MemorySpec, RecurrentMemory
from weft.memory.tiers.disk.format import UnitHeader, checksum, decode
from weft.memory.tiers.exchange.sent_units import GrantedPlaces, header_of_staged

THERE = Destination("decode", 1)


@dataclass
class CopyTicket:
    plan: CopyPlan
    executed: bool = False


def values_of(piece: UnitPiece | None, length: int, size_bytes: int) -> slice:
    """Which of a unit's `length` values stand for these of its bytes."""
    start, end = (0, size_bytes) if piece is None else piece
    return slice(start * length // size_bytes, end * length // size_bytes)


def with_layers(spec: MemorySpec) -> MemorySpec:
    """The same memory, spread over two layers of each kind, one after the other."""
    halves = []
    for memory in spec.memories:
        if isinstance(memory, AttentionMemory):
            halves.append(replace(memory, head_dim=memory.head_dim // 2))
        else:
            state = tuple(replace(part, shape=(part.shape[0] // 2,)) for part in memory.state)
            halves.append(RecurrentMemory(state, memory.tail, memory.conv_width))
    return replace(spec, memories=(*halves, *halves))


class AreaDevice(RollingDevice):
    """The rolling-hash device with areas of host memory below it, one for each size. Copies land at random moments.

    A step computes its layers one after the other, while copies go on. What a layer has not written yet reads as
    poison.
    """

    def __init__(self, workload: Workload, config: EngineConfig, sizes: Sequence[int], random: Random) -> None:
        super().__init__(workload.spec, config.memory_bytes, config.max_sequences, workload.lazy)
        self.bytes_of = bytes_of = unit_bytes(workload.spec)
        # Steps whose layers are not all computed, and what they write.
        self.computing: list[tuple[dict, set[tuple[Kind, int]]]] = []
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
        while wait and not ticket.executed:
            self.progress()
            if not self.computing and not ticket.executed:
                self.execute_copy(ticket.plan.level, ticket.plan.direction)
        return 1e-6 if ticket.executed else None

    def progress(self) -> None:
        if self.computing and self.random.random() < self.patience:
            self.computing[0][0]["layers"] += 1
            self.finish_layers(len(self.spec.memories))
        elif self._waiting and not self._waits_for_masks(self._waiting[0][0]) and self.random.random() < 0.1:
            self._execute_next()
        for (level, direction), queue in self.queues.items():
            if queue and self.random.random() < self.patience / 2:
                self.execute_copy(level, direction)

    def finish_layers(self, most: int) -> None:
        self.computing = [each for each in self.computing if each[0]["layers"] < most]

    def has_computed(self, flight: dict, layer: int) -> bool:
        if "landing" not in flight:
            return False
        return flight["layers"] > layer or all(each is not flight for each, _ in self.computing)

    def execute_copy(self, level: int, direction: Direction) -> None:
        ticket = self.queues[level, direction].popleft()
        for name, upper, lower in ticket.plan.units:
            kind, piece = Kind(name), ticket.plan.piece
            device, area = self.memory[kind], self.areas[level][kind]
            chosen = values_of(piece, device.shape[1], self.bytes_of[kind])
            if direction is Direction.SAVE:
                area[lower, chosen] = device[upper, chosen] if self.is_written(kind, upper, piece) else POISON
            else:
                device[upper, chosen] = area[lower, chosen]
        ticket.executed = True

    def is_written(self, kind: Kind, unit: int, piece: UnitPiece | None) -> bool:
        """Whether no step is still to write these bytes of a unit."""
        end, filled, layers = self.bytes_of[kind] if piece is None else piece.end, 0, 0
        for layer, memory in enumerate(self.spec.memories):
            own = MemorySpec((memory,), self.spec.cell)
            size = {Kind.PAGE: own.page_bytes, Kind.WINDOW: own.window_page_bytes, Kind.STATE: own.state_bytes}[kind]
            if size and filled < end:
                filled, layers = filled + size, layer + 1
        return all(flight["layers"] >= layers for flight, units in self.computing if (kind, unit) in units)

    def launch(self, plan: Plan) -> dict:
        self.progress()
        return super().launch(plan)

    def landed(self, flight: dict) -> bool:
        self.progress()
        return "landing" in flight and all(each is not flight for each, _ in self.computing)

    def land(self, flight: dict) -> Landing:
        landing = super().land(flight)
        while any(each is flight for each, _ in self.computing):
            self.progress()
        return landing

    def _execute_next(self) -> None:
        plan, flight = self._waiting[0]
        super()._execute_next()
        flight["layers"] = 0
        self.computing.append((flight, self.written_by(plan)))
        self.progress()

    def written_by(self, plan: Plan) -> set[tuple[Kind, int]]:
        found = {(Kind.STATE, slot) for row in range(plan.rows) for slot in self.captures_of(plan, row).values()}
        for row, (start, end) in enumerate(zip(plan.start.tolist(), plan.end.tolist(), strict=True)):
            for position in range(start, end):
                for kind, is_used in ((Kind.PAGE, self.spec.page_bytes), (Kind.WINDOW, self.spec.window)):
                    if is_used:
                        found.add((kind, self._place(kind, plan, row, position)[0]))
        return found

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
    granted: GrantedPlaces
    staged: list[StagedUnit] = field(default_factory=list)  # not read yet
    flying: list[tuple[bytes, int, np.ndarray]] = field(default_factory=list)  # header, start and values
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
            for place in travel.granted:
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
        values = self.staged_values(unit).copy()
        header = header_of_staged(unit, values.tobytes())
        if self.random.random() < self.faults.lost:
            return
        if self.random.random() < self.faults.damaged:
            values[self.random.randrange(len(values))] ^= np.uint64(1 << 40)
        self.fly(travel, unit, header, values)

    def staged_values(self, unit: StagedUnit) -> np.ndarray:
        kind = Kind(unit.kind)
        found = self.source[kind][unit.unit]
        return found[values_of(unit.piece, len(found), unit_bytes(self.spec)[kind])]

    def fly(self, travel: Travel, unit: StagedUnit, header: UnitHeader, values: np.ndarray) -> None:
        kind = Kind(unit.kind)
        chosen = values_of(unit.piece, self.source[kind].shape[1], unit_bytes(self.spec)[kind])
        for _ in range(1 + (self.random.random() < self.faults.repeated)):
            travel.flying.append((header.encode(), 8 * chosen.start, values))

    def _deliver(self, travel: Travel) -> None:
        index = self.random.randrange(len(travel.flying)) if self.faults.reordered else 0
        if self.random.random() < 0.95:
            # The pieces of one unit seldom overtake each other.
            unit = decode(travel.flying[index][0])
            index = next(i for i, each in enumerate(travel.flying) if decode(each[0]).unit == unit.unit)
        entry, start, values = travel.flying.pop(index)
        header = decode(entry)
        assert header is not None
        if travel.granted.misplaced(header, start) is not None:
            # A repeated unit has lost its place; so has a piece that overtook another.
            travel.ended = True
            return
        place = travel.granted.begin(header)
        values = self.fetch(travel, header, start) if not len(values) else values
        self.target[Kind(place.kind)][place.unit, start // 8 : start // 8 + len(values)] = values
        if checksum(values.tobytes()) != header.checksum:
            travel.ended = True
            return
        self.accepted(travel, header, start)
        if travel.granted.fill(header):
            self.receive_events.append(UnitReceived(travel.number, header.unit))

    def fetch(self, travel: Travel, header: UnitHeader, start: int) -> np.ndarray:
        raise NotImplementedError("units carry their values")

    def accepted(self, travel: Travel, header: UnitHeader, start: int) -> None:
        pass

    def forget(self, travel: Travel) -> None:
        pass

    def _bury(self, travel: Travel) -> None:
        if self.random.random() < 0.8:
            # Late writes into memory that was not given back.
            for place in travel.granted:
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
        header = header_of_staged(unit, self.staged_values(unit).tobytes())
        self.announced.setdefault(travel.number, []).append(unit)
        self.fly(travel, unit, header, np.zeros(0))

    def announced_at(self, travel: Travel, place: int, start: int) -> StagedUnit:
        def begins(unit: StagedUnit) -> int:
            kind = Kind(unit.kind)
            return 8 * values_of(unit.piece, self.source[kind].shape[1], unit_bytes(self.spec)[kind]).start

        return next(unit for unit in self.announced[travel.number] if unit.place == place and begins(unit) == start)

    def fetch(self, travel: Travel, header: UnitHeader, start: int) -> np.ndarray:
        """Read the piece of a place now."""
        values = self.staged_values(self.announced_at(travel, header.unit, start)).copy()
        assert checksum(values.tobytes()) == header.checksum, "a unit has changed before it was read"
        if self.random.random() < self.faults.damaged:
            values[self.random.randrange(len(values))] ^= np.uint64(1 << 40)
        return values

    def accepted(self, travel: Travel, header: UnitHeader, start: int) -> None:
        """Tell the sender that a piece was taken."""
        unit = self.announced_at(travel, header.unit, start)
        self.announced[travel.number].remove(unit)
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
        self.wire.travels[transfer] = Travel(transfer, offer, GrantedPlaces(self.wire.sizes()))
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
            travel.granted.grant(units)
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
