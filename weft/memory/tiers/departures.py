"""Prefixes on their way to other engines: units of published cells are copied to a staging area, and sent from there.

Pages and checkpoints never change once they are published, so they are copied beside the steps. While a prompt is
being computed, its lease protects its cells. When it is computed, the departure pins the path and shares the resume
point until the last unit is staged.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from weft.base.copies import CopyPlan, Direction, UnitCopy
from weft.base.transfers import StagedUnit
from weft.memory.arena import Arena, choose_slab_bytes, slabs_for
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.memory.tiers.units import PointUnits, release_point, share_point
from weft.memory.trie import Node

CHUNK_BYTES = 16 << 20
# The share of the staging area that one prefix may use, so that a slow receiver stops no other transfer.
SHARE = 1 / 8


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


class Departure:
    """One prefix on its way out.

    cells: [first, next) are staged   [next, granted) may be   [granted, end) not yet
    """

    __slots__ = (
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
        # Staged units that the transport may read.
        self.staged: set[tuple[Kind, int]] = set()
        self.staged_bytes = 0  # with those under copy


@dataclass(slots=True)
class DepartureFlight:
    """Copies of one plan: units of the device that it owns, and where they go."""

    departure: Departure
    copies: list[tuple[UnitCopy, StagedUnit]]


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
        self._share_bytes = int(SHARE * arena.slabs * arena.slab_bytes)
        self._flights: deque[DepartureFlight] = deque()
        self._number = 0

    @property
    def in_flight(self) -> bool:
        """Whether memory of the device is held until it is staged."""
        return bool(self._flights) or any(each.tip is not None for each in self.active.values())

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

    def computed(self, number: int, node: Node, slot: int | None, window: tuple[int, ...]) -> None:
        """Protect a prefix that was just computed, and its resume point, until they are staged."""
        departure = self.active[number]
        assert node.depth == departure.end
        departure.computed = True
        self.cache.trie.pin(node)
        departure.tip = node
        if self.cache.point_bytes:
            departure.point = PointUnits(slot, window)
            share_point(self.cache, departure.point)

    def is_staged(self, number: int) -> bool:
        """Return whether all that the receiver wants of a computed prefix is staged."""
        departure = self.active[number]
        cells = departure.computed and departure.next == departure.granted == departure.end
        point = departure.point_staged or not departure.point_granted
        return cells and point and not any(flight.departure is departure for flight in self._flights)

    def let_go(self, number: int) -> None:
        """Give up the memory of the device that a prefix holds; copies in flight keep theirs."""
        departure = self.active[number]
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
        for kind, unit in departure.staged:
            self.arena.release(kind, unit)
        departure.staged.clear()

    # copies ---------------------------------------------------------------------------------------------------------

    def plan(self) -> CopyPlan | None:
        """Return the next copies to the staging area, or None if there is nothing to copy or no room."""
        for departure in self.active.values():
            copies = self._fill(departure)
            if copies:
                self._number += 1
                self._flights.append(DepartureFlight(departure, copies))
                size = sum(self.arena.unit_bytes[Kind(copy.kind)] for copy, _ in copies)
                units = tuple(copy for copy, _ in copies)
                return CopyPlan(self._number, Direction.SAVE, units, size, level=self.level)
        return None

    def _fill(self, departure: Departure) -> list[tuple[UnitCopy, StagedUnit]]:
        found: list[tuple[UnitCopy, StagedUnit]] = []
        cell, left = self.spec.cell, CHUNK_BYTES
        while departure.next < departure.granted and left > 0 and self.paged:
            index = departure.next
            node = self.cache.trie.nodes.get(departure.keys[index])
            page = None
            if node is not None and node.page is not None and self._may_stage(departure, [Kind.PAGE]):
                page = self._stage(departure, Kind.PAGE, node.page)
            if page is None:
                break
            parent = departure.keys[index - 1] if index else None
            found.append(self._unit(departure, index, page, departure.keys[index], parent, (index + 1) * cell))
            departure.next += 1
            left -= self.arena.unit_bytes[Kind.PAGE]
        if not self.paged:
            departure.next = departure.granted
        if departure.next == departure.end and departure.point_granted and left > 0:
            found += self._fill_point(departure)
        return found

    def _fill_point(self, departure: Departure) -> list[tuple[UnitCopy, StagedUnit]]:
        point, end, cell = departure.point, departure.end, self.spec.cell
        if point is None or departure.point_staged:
            return []
        wanted = [] if point.slot is None else [(end, Kind.STATE, point.slot, end * cell)]
        first = end - len(point.window)
        wanted += [(end + 1 + i, Kind.WINDOW, page, (first + i + 1) * cell) for i, page in enumerate(point.window)]
        found: list[tuple[UnitCopy, StagedUnit]] = []
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

    def _unstage(self, departure: Departure, found: list[tuple[UnitCopy, StagedUnit]]) -> None:
        for copy, _ in found:
            self._release_source(copy)
            departure.staged_bytes -= self.arena.unit_bytes[Kind(copy.kind)]
            self.arena.release(Kind(copy.kind), copy.lower)

    def _unit(
        self, departure: Departure, place: int, copy: UnitCopy, key: Key, parent: Key | None, position: int
    ) -> tuple[UnitCopy, StagedUnit]:
        return copy, StagedUnit(place, copy.kind, copy.lower, key, parent, position, departure.tenant)

    def landed(self) -> tuple[int, list[StagedUnit]] | None:
        """Release what the oldest copies read; return the number of their transfer and the units to send.

        None: the transfer has ended meanwhile.
        """
        flight = self._flights.popleft()
        departure = flight.departure
        for copy, _ in flight.copies:
            self._release_source(copy)
        if self.active.get(departure.number) is not departure:
            for copy, _ in flight.copies:
                self.arena.release(Kind(copy.kind), copy.lower)
            return None
        departure.staged.update((Kind(copy.kind), copy.lower) for copy, _ in flight.copies)
        return departure.number, [unit for _, unit in flight.copies]

    def _release_source(self, copy: UnitCopy) -> None:
        if copy.kind == Kind.STATE:
            self.cache.release_slot(copy.upper)
        else:
            self.cache.arena.release(Kind(copy.kind), copy.upper)

    def sent(self, number: int, units: tuple[StagedUnit, ...]) -> None:
        """Take back the staging memory of units that were sent."""
        departure = self.active[number]
        for unit in units:
            kind = Kind(unit.kind)
            departure.staged.discard((kind, unit.unit))
            self.arena.release(kind, unit.unit)
            departure.staged_bytes -= self.arena.unit_bytes[kind]
            self.sent_bytes += self.arena.unit_bytes[kind]

    # audit ----------------------------------------------------------------------------------------------------------

    def held(self) -> Iterator[tuple[Kind, int]]:
        """Yield the units of the device that departures own, once for each ownership."""
        for flight in self._flights:
            for copy, _ in flight.copies:
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
        """Check that every staged unit has one owner: a transfer, or a copy to the staging area."""
        counted: dict[Kind, Counter[int]] = {kind: Counter() for kind in self.arena.unit_bytes}
        for departure in self.active.values():
            for kind, unit in departure.staged:
                counted[kind][unit] += 1
        for flight in self._flights:
            for copy, _ in flight.copies:
                counted[Kind(copy.kind)][copy.lower] += 1
        for kind, owners in self.arena.owners.items():
            assert counted[kind] == owners, f"staged {kind}: {dict(counted[kind])}, recorded {owners}"
