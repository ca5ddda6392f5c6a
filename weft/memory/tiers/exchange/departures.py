"""Prefixes on their way to other engines: units are copied to a staging area beside the steps, and sent from there.

Pages and checkpoints never change once they are published. Those that a step in flight writes are copied layer by
layer, each section as soon as the step has computed it: nothing that a step has begun can change what it writes. While
a prompt is being computed, its lease protects its cells, and copies own what they read. When it is computed, the
departure pins the path and shares the resume point until the last unit is staged.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitPiece
from weft.base.transfers import StagedUnit
from weft.memory.arena import Arena, choose_slab_bytes, slabs_for
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.lease import Lease
from weft.memory.sections import Section, sections
from weft.memory.spec import MemorySpec
from weft.memory.tiers.exchange.sent_units import piece_of
from weft.memory.tiers.units import PointUnits, release_point, share_point
from weft.memory.trie import Node

CHUNK_BYTES = 16 << 20
# The share of the staging area that one prefix may use, so that a slow receiver stops no other transfer.
SHARE = 1 / 4


def area_bytes(spec: MemorySpec, cells: int) -> int:
    """Return the bytes of an area in which a resume point and this many pages have room, wherever they lie."""
    sizes: dict[Kind, int] = {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL}
    counts = {Kind.PAGE: cells, Kind.STATE: 1, Kind.WINDOW: spec.window_cells + 2}
    size = sum(sizes.values())
    while True:
        slab = choose_slab_bytes(sizes, size)
        needed = [slabs_for(sizes[kind], slab, counts[kind]) for kind in sizes]
        if sum(needed) <= size // slab:
            return size
        size = size * 9 // 8 + 64


def staging(spec: MemorySpec, cache: Cache, size_bytes: int, level: int) -> Departures:
    """Return what stages prefixes in an area of this size, the device's tier of this level."""
    sizes: dict[Kind, int] = {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL}
    return Departures(spec, cache, Arena(sizes, size_bytes), level)


@dataclass(frozen=True, slots=True)
class Aloft:
    """What a step in flight computes of a prefix: the pages of cells from `first` on; the point, if it is the end."""

    flight: Any
    step: int
    first: int
    pages: tuple[int, ...]
    point: PointUnits | None

    def page(self, cell: int) -> int | None:
        return self.pages[cell - self.first] if 0 <= cell - self.first < len(self.pages) else None


class Departure:
    """One prefix on its way out.

    cells: [first, next) are staged   [next, granted) may be   [granted, end) not yet
    """

    __slots__ = (
        "aloft",
        "computed",
        "end",
        "granted",
        "keys",
        "next",
        "number",
        "point",
        "point_granted",
        "point_staged",
        "staged",
        "staged_bytes",
        "tenant",
        "tip",
    )

    def __init__(self, number: int, keys: list[Key], tenant: bytes) -> None:
        self.number = number
        self.keys = keys
        self.tenant = tenant
        self.end = len(keys)
        self.next = self.granted = 0
        self.point_granted = self.point_staged = self.computed = False
        self.tip: Node | None = None  # pinned
        self.point: PointUnits | None = None  # shared
        self.aloft: list[Aloft] = []
        # Staged units and pieces that the transport may read. Each owns its unit once.
        self.staged: set[StagedUnit] = set()
        self.staged_bytes = 0  # with those under copy


# The copy of a unit to the staging area, and what is sent then.
Staging = tuple[UnitCopy, StagedUnit]


class After(NamedTuple):
    """When a copy may begin: when a step in flight has computed a layer."""

    step: int
    layer: int
    flight: Any


@dataclass(slots=True)
class DepartureFlight:
    """Copies of one plan: units of the device that it owns, and where they go."""

    departure: Departure
    plan: CopyPlan
    staged: list[StagedUnit]
    after: After | None = None

    @property
    def copies(self) -> tuple[UnitCopy, ...]:
        return self.plan.units


class Departures:
    """`level` is the number of the staging area among the device's tiers."""

    def __init__(self, spec: MemorySpec, cache: Cache, arena: Arena, level: int) -> None:
        self.spec = spec
        self.cache = cache
        self.arena = arena
        self.level = level
        self.paged = Kind.PAGE in arena.unit_bytes
        self.active: dict[int, Departure] = {}
        self.sent_bytes = 0
        self.sections = sections(spec)
        self._share_bytes = int(SHARE * arena.slabs * arena.slab_bytes)
        self._flights: deque[DepartureFlight] = deque()
        # Planned and not begun.
        self.queued: deque[DepartureFlight] = deque()
        self._number = 0

    @property
    def in_flight(self) -> bool:
        """Whether memory of the device is held until it is staged."""
        return bool(self._flights or self.queued) or any(each.tip is not None for each in self.active.values())

    # prefixes -------------------------------------------------------------------------------------------------------

    def begin(self, number: int, keys: list[Key], tenant: bytes) -> Departure:
        """Expect the prompt with these cells to be computed."""
        departure = self.active[number] = Departure(number, keys, tenant)
        return departure

    def granted(self, number: int, first: int, end: int, point: bool) -> None:
        """Let the pages of cells [first, end) be staged, and the point."""
        departure = self.active[number]
        departure.next = max(departure.next, min(first, departure.end))
        departure.granted = max(departure.granted, min(end, departure.end))
        departure.point_granted = departure.point_granted or (point and self.cache.point_bytes > 0)

    def launched(self, number: int, aloft: Aloft) -> None:
        """Let a prefix leave that a step in flight computes."""
        self.active[number].aloft.append(aloft)

    def landed_step(self, number: int, step: int) -> None:
        """Forget a step in flight of a prefix: its cells are published."""
        if number in self.active:
            aloft = self.active[number].aloft
            aloft[:] = [each for each in aloft if each.step != step]

    def computed(self, number: int, lease: Lease, point: PointUnits) -> bool:
        """Protect a prefix that was just computed, and its resume point, until they are staged.

        Returns whether it departs: what is being dropped was not kept, and the other engine computes it.
        """
        if lease.hidden:
            return False
        departure = self.active[number]
        assert lease.node is not None
        assert lease.node.depth == departure.end
        departure.computed = True
        self.cache.trie.pin(lease.node)
        departure.tip = lease.node
        if self.cache.point_bytes:
            departure.point = point
            share_point(self.cache, departure.point)
        return True

    def is_staged(self, number: int) -> bool:
        """Return whether all that the receiver wants of a computed prefix is staged."""
        departure = self.active[number]
        cells = departure.computed and departure.next == departure.granted == departure.end
        point = departure.point_staged or not departure.point_granted
        return cells and point and not any(each.departure is departure for each in (*self._flights, *self.queued))

    def let_go(self, number: int) -> None:
        """Give up the memory of the device that a prefix holds; copies in flight keep theirs."""
        departure = self.active[number]
        departure.aloft.clear()
        self.cache.unpin(departure.tip)
        departure.tip = None
        if departure.point is not None:
            release_point(self.cache, departure.point)
            departure.point = None

    def chosen(self, tenant: bytes | None, prefix: bytes | None) -> list[int]:
        """Return the transfers of a tenant, those with a cell whose key has this prefix, or all."""
        every = tenant is None and prefix is None
        return [
            number
            for number, each in self.active.items()
            if every
            or each.tenant == tenant
            or (prefix is not None and any(key.startswith(prefix) for key in each.keys))
        ]

    def ended(self, number: int) -> None:
        """Forget a prefix whose transfer has ended: no staged unit of it is read any more."""
        self.let_go(number)
        departure = self.active.pop(number)
        for unit in departure.staged:
            self.arena.release(Kind(unit.kind), unit.unit)
        departure.staged.clear()

    # copies ---------------------------------------------------------------------------------------------------------

    def plan(self, has_computed: Callable[[Any, int], bool]) -> CopyPlan | None:
        """Return the next copies to the staging area, or None if there is nothing to copy yet or no room.

        `has_computed` says whether a flight has written the memory of a layer.
        """
        self._fill_queue()
        if not self.queued:
            return None
        # Only the first: its step goes on between two looks, and a later piece of a unit must not overtake it.
        first = self.queued[0]
        if first.after is not None and not has_computed(first.after.flight, first.after.layer):
            return None
        self._flights.append(self.queued.popleft())
        return first.plan

    def _fill_queue(self) -> None:
        """Queue all copies that there is room for, in the order in which they can begin."""
        before = len(self.queued)
        for departure in self.active.values():
            if not self.queue_published(departure):
                self.queue_sections(departure)
        if len(self.queued) == before:
            return
        ready = [each for each in self.queued if each.after is None]
        later = [(each.after[:2], each) for each in self.queued if each.after is not None]
        self.queued = deque([*ready, *(each for _, each in sorted(later, key=lambda found: found[0]))])

    def queue(self, departure: Departure, found: list[Staging], piece: UnitPiece | None, after: After | None) -> None:
        self._number += 1
        units = tuple(copy for copy, _ in found)
        staged = [unit if piece is None else replace(unit, piece=piece) for _, unit in found]
        size = sum(self._size(unit) for unit in staged)
        plan = CopyPlan(self._number, Direction.SAVE, units, size, level=self.level, piece=piece)
        self.queued.append(DepartureFlight(departure, plan, staged, after))

    def queue_published(self, departure: Departure) -> bool:
        """Copy whole pages of the next cells that are published; return whether there are any."""
        found: list[Staging] = []
        left = CHUNK_BYTES
        while departure.next < departure.granted and left > 0 and self.paged:
            node = self.cache.trie.nodes.get(departure.keys[departure.next])
            staging = None if node is None or node.page is None else self._stage_page(departure, node.page)
            if staging is None:
                break
            found.append(staging)
            left -= self.arena.unit_bytes[Kind.PAGE]
        if not self.paged:
            departure.next = departure.granted
        if found:
            self.queue(departure, found, None, None)
        return bool(found)

    def queue_sections(self, departure: Departure) -> None:
        """Copy, layer by layer, the next pages that a step in flight writes, and the point."""
        found: list[Staging] = []
        aloft = next((each for each in departure.aloft if each.page(departure.next) is not None), None)
        while aloft is not None and departure.next < departure.granted:
            page = aloft.page(departure.next)
            staging = None if page is None else self._stage_page(departure, page)
            if staging is None:
                break
            found.append(staging)
        if departure.next == departure.end and departure.point_granted and not departure.point_staged:
            last = next((each for each in departure.aloft if each.point is not None), None)
            if departure.point is not None:
                found += self._stage_point(departure, departure.point)
            elif last is not None:
                aloft = last
                found += self._stage_point(departure, last.point)
        if found:
            self.cut(departure, found, aloft)

    def cut(self, departure: Departure, found: list[Staging], aloft: Aloft | None) -> None:
        """Queue the copies of some units, section by section."""
        for section in self.sections:
            chosen = [each for each in found if each[0].kind == section.kind]
            if section.start:
                # The first section has the ownership that staging has taken.
                for copy, _ in chosen:
                    self.cache.arena.share(section.kind, copy.upper)
                    self.arena.share(section.kind, copy.lower)
            after = None if aloft is None else After(aloft.step, section.layer, aloft.flight)
            if chosen:
                self.queue(departure, chosen, self._piece(section), after)

    def _piece(self, section: Section) -> UnitPiece | None:
        piece = UnitPiece(section.start, section.end)
        return None if piece == (0, self.arena.unit_bytes[section.kind]) else piece

    def _size(self, unit: StagedUnit) -> int:
        start, end = piece_of(unit, self.arena.unit_bytes)
        return end - start

    def _stage_page(self, departure: Departure, page: int) -> Staging | None:
        """Stage the page of the next cell, if there is room for it."""
        index = departure.next
        copy = self._stage(departure, Kind.PAGE, page) if self._may_stage(departure, [Kind.PAGE]) else None
        if copy is None:
            return None
        departure.next += 1
        parent = departure.keys[index - 1] if index else None
        return self._unit(departure, index, copy, departure.keys[index], parent, (index + 1) * self.spec.cell)

    def _stage_point(self, departure: Departure, point: PointUnits | None) -> list[Staging]:
        """Stage all units of the resume point, or none if there is no room."""
        end, cell = departure.end, self.spec.cell
        assert point is not None
        wanted = [] if point.slot is None else [(end, Kind.STATE, point.slot, end * cell)]
        first = end - len(point.window)
        wanted += [(end + 1 + i, Kind.WINDOW, page, (first + i + 1) * cell) for i, page in enumerate(point.window)]
        found: list[Staging] = []
        if not self._may_stage(departure, [kind for _, kind, _, _ in wanted]):
            return []
        for place, kind, unit, position in wanted:
            copy = self._stage(departure, kind, unit)
            if copy is None:
                self._unstage(departure, found)
                return []
            found.append(self._unit(departure, place, copy, departure.keys[-1], None, position))
        departure.point_staged = True
        return found

    def _may_stage(self, departure: Departure, kinds: list[Kind]) -> bool:
        """Return whether a prefix keeps to its share of the staging area with units of these kinds."""
        size = sum(self.arena.unit_bytes[kind] for kind in kinds)
        return not departure.staged_bytes or departure.staged_bytes + size <= self._share_bytes

    def _stage(self, departure: Departure, kind: Kind, unit: int) -> UnitCopy | None:
        """Return the copy of a unit to the staging area, or None if that is full."""
        staged = self.arena.take(kind)
        if staged is None:
            return None
        self.cache.arena.share(kind, unit)
        departure.staged_bytes += self.arena.unit_bytes[kind]
        return UnitCopy(kind.value, unit, staged)

    def _unstage(self, departure: Departure, found: list[Staging]) -> None:
        for copy, _ in found:
            self.release_source(copy)
            departure.staged_bytes -= self.arena.unit_bytes[Kind(copy.kind)]
            self.arena.release(Kind(copy.kind), copy.lower)

    def _unit(
        self, departure: Departure, place: int, copy: UnitCopy, key: Key, parent: Key | None, position: int
    ) -> Staging:
        return copy, StagedUnit(place, copy.kind, copy.lower, key, parent, position, departure.tenant)

    def landed(self) -> tuple[int, list[StagedUnit]] | None:
        """Release what the oldest copies read; return the number of their transfer and what to send.

        None: the transfer has ended meanwhile.
        """
        flight = self._flights.popleft()
        departure = flight.departure
        for copy in flight.copies:
            self.release_source(copy)
        if self.active.get(departure.number) is not departure:
            for copy in flight.copies:
                self.arena.release(Kind(copy.kind), copy.lower)
            return None
        departure.staged.update(flight.staged)
        return departure.number, flight.staged

    def release_source(self, copy: UnitCopy) -> None:
        if copy.kind == Kind.STATE:
            self.cache.release_slot(copy.upper)
        else:
            self.cache.arena.release(Kind(copy.kind), copy.upper)

    def sent(self, number: int, units: tuple[StagedUnit, ...]) -> None:
        """Take back the staging memory of units that were sent."""
        departure = self.active[number]
        for unit in units:
            departure.staged.discard(unit)
            self.arena.release(Kind(unit.kind), unit.unit)
            departure.staged_bytes -= self._size(unit)
            self.sent_bytes += self._size(unit)

    # audit ----------------------------------------------------------------------------------------------------------

    def held(self) -> Iterator[tuple[Kind, int]]:
        """Yield the units of the device that departures own, once for each ownership."""
        for flight in (*self._flights, *self.queued):
            for copy in flight.copies:
                yield Kind(copy.kind), copy.upper
        for departure in self.active.values():
            if departure.point is not None:
                if departure.point.slot is not None:
                    yield Kind.STATE, departure.point.slot
                for page in departure.point.window:
                    yield Kind.WINDOW, page

    def pins(self) -> list[Node]:
        return [departure.tip for departure in self.active.values() if departure.tip is not None]

    def audit(self) -> None:
        """Check the owners of staged units: each piece of them has one, a transfer or a copy to the staging area."""
        counted: dict[Kind, Counter[int]] = {kind: Counter() for kind in self.arena.unit_bytes}
        for departure in self.active.values():
            for unit in departure.staged:
                counted[Kind(unit.kind)][unit.unit] += 1
        for flight in (*self._flights, *self.queued):
            for copy in flight.copies:
                counted[Kind(copy.kind)][copy.lower] += 1
        for kind, owners in self.arena.owners.items():
            assert counted[kind] == owners, f"staged {kind}: {dict(counted[kind])}, recorded {owners}"
