"""Copies resume points back from the lower tier to the upper one, for requests that wait for them.

A load allocates, copies, and publishes when its copies have landed, never before. It goes chunk by chunk and owns the
units under copy. A load that no request waits for any more, or that finds no memory, ends with the chunk in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from weft.base.copies import CopyPlan, Direction
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tiers.saves import held_by
from weft.memory.tiers.units import (
    CellCopy,
    CopyBatch,
    PointCopy,
    PointUnits,
    hand_over,
    release_point,
    take,
    take_point,
)
from weft.memory.trie import Node


class Load:
    """One resume point on its way up.

    cells: [0, first) were in the upper tier   [first, next) are planned   [next, end) are still to be copied

    `left_bytes` have not landed, and `began` is when its first request began to wait.
    """

    __slots__ = (
        "began",
        "broken",
        "end",
        "first",
        "hits",
        "in_flight",
        "keys",
        "left_bytes",
        "next",
        "origin",
        "planned",
        "point",
        "source",
        "tip",
        "waiters",
    )

    def __init__(self, keys: list[Key], first: int, source: Node, tip: Node | None, point: PointUnits) -> None:
        self.keys = keys
        self.first = self.next = first
        self.end = source.depth
        self.source = source  # in the lower tier, pinned
        self.tip = tip  # the deepest cell of the path in the upper tier, pinned
        self.point = point  # units of the point in the lower tier, shared
        self.origin = None if source.resume is None else source.resume.origin
        self.hits = 0 if source.resume is None else source.resume.hits
        self.planned = False
        self.broken = False
        self.in_flight = 0
        self.left_bytes = 0
        self.began = 0.0
        self.waiters: set[int] = set()


class Loads:
    """`chunk_bytes` go into one plan, and up to `most_bytes` are in flight.

    `damaged` are the keys of cells whose copies in the lower tier turned out to be damaged, until they are saved again
    or dropped. `labelled`: plans say what each unit is, and of which tenant. `frees_memory` returns whether other
    copies hold memory of the upper tier until they land.
    """

    def __init__(
        self,
        upper: Cache,
        lower: Cache,
        chunk_bytes: int,
        most_bytes: int,
        damaged: set[Key],
        labelled: bool,
        tenant_of: Callable[[Node], bytes],
        frees_memory: Callable[[], bool],
    ) -> None:
        self.upper = upper
        self.lower = lower
        self.bytes = 0
        self.cancelled = 0
        self.frees_memory = frees_memory
        self.labelled = labelled
        self.tenant_of = tenant_of
        self.damaged = damaged
        self.chunk_bytes = chunk_bytes
        self.most_bytes = most_bytes
        self._active: dict[Key, Load] = {}
        self._flights: deque[tuple[Load, CopyBatch]] = deque()
        self._in_flight_bytes = 0
        self._number = 0

    @property
    def waiting(self) -> bool:
        """Whether there is more to plan."""
        return any(not load.planned for load in self._active.values())

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def queued_bytes(self) -> int:
        """Bytes of all loads that have not landed."""
        ahead = sum(self.size_bytes(load.next, load.end) for load in self._active.values() if not load.planned)
        return self._in_flight_bytes + ahead

    def size_bytes(self, first: int, end: int) -> int:
        """Return the bytes of the cells [first, end) and a resume point."""
        return max(0, end - first) * self.lower.valuation.page_bytes + self.lower.point_bytes

    # requests -------------------------------------------------------------------------------------------------------

    def awaited_by(self, waiter: int) -> Load | None:
        """Return the load that a request waits for, if it does."""
        return next((load for load in self._active.values() if waiter in load.waiters), None)

    def bytes_up_to(self, load: Load) -> int:
        """Return the bytes that are to land until a load has ended: its own, and those of loads that began before."""
        size = 0
        for each in self._active.values():
            size += each.left_bytes
            if each is load:
                break
        return size

    def begin(self, waiter: int, keys: list[Key], matched: int, source: Node, now: float = 0.0) -> None:
        """Load the path to `source`, of which the upper tier has `matched` cells, or join a load of it."""
        load = self._active.get(source.key)
        if load is None:
            first = min(matched, source.depth)
            tip = self.upper.trie.nodes[keys[first - 1]] if first else None
            if tip is not None:
                self.upper.trie.pin(tip)
            load = Load(keys[: source.depth], first, source, tip, PointUnits(*self.lower.pin(source)))
            load.left_bytes, load.began = self.size_bytes(first, load.end), now
            self._active[source.key] = load
        load.waiters.add(waiter)

    def leave(self, waiter: int) -> None:
        """Forget a request that has started or ended; cancel its load if no other request waits for it."""
        for load in list(self._active.values()):
            if waiter in load.waiters:
                load.waiters.discard(waiter)
                if not load.waiters and not load.planned:
                    self._cancel(load)

    def _cancel(self, load: Load) -> None:
        self.cancelled += 1
        load.planned = True
        if not load.in_flight:
            self._end(load)

    def abandon(self) -> None:
        """Give up all loads. Copies under way land, and nothing of them is published."""
        for load in list(self._active.values()):
            load.broken = True
            if not load.planned:
                self._cancel(load)

    # planning -------------------------------------------------------------------------------------------------------

    def plan(self) -> CopyPlan | None:
        """Return the next copies, or None if there is nothing to load or enough in flight."""
        for load in list(self._active.values()):
            if self._in_flight_bytes >= self.most_bytes:
                return None
            if load.planned:
                continue
            batch = self._fill(load)
            if batch.cells or batch.point:
                return self._launch(load, batch)
        return None

    def _fill(self, load: Load) -> CopyBatch:
        tenant = self.tenant_of(load.source) if self.labelled else b""
        batch, page_bytes = CopyBatch(tenant), max(1, self.lower.valuation.page_bytes)
        while batch.size_bytes < self.chunk_bytes and load.next < load.end:
            if not self._add_cell(batch, load.keys[load.next]):
                self._cancel_unless(load, batch)
                return batch
            load.next += 1
            batch.size_bytes += page_bytes
        if load.next == load.end and batch.size_bytes < self.chunk_bytes:
            self._add_point(load, batch)
        return batch

    def _cancel_unless(self, load: Load, batch: CopyBatch) -> None:
        """End a load that found no memory, unless some is about to be free. What is already planned still lands."""
        if self.frees_memory():
            return
        self.cancelled += 1
        load.planned = True
        if not load.in_flight and not (batch.cells or batch.point):
            self._end(load)

    def _add_cell(self, batch: CopyBatch, key: Key) -> bool:
        source = self.lower.trie.nodes[key]
        if source.page is None:
            batch.cells.append(CellCopy(key, None, 0, None, None))
            return True
        page = take(self.upper, Kind.PAGE)
        if page is None:
            return False
        batch.cells.append(CellCopy(key, None, source.depth * self.lower.cell, page, source.page))
        return True

    def _add_point(self, load: Load, batch: CopyBatch) -> None:
        if load.origin is None:
            load.planned = True
            if not load.in_flight and not batch.cells:
                self._end(load)
            return
        position = load.end * self.upper.cell
        units = take_point(self.upper, position, len(load.point.window), take)
        if units is None:
            self._cancel_unless(load, batch)
            return
        load.planned = True
        batch.point = PointCopy(load.source.key, position, load.origin, units, load.point, load.hits)
        batch.size_bytes += self.lower.point_bytes

    def _launch(self, load: Load, batch: CopyBatch) -> CopyPlan:
        self._number += 1
        load.in_flight += 1
        self._in_flight_bytes += batch.size_bytes
        self._flights.append((load, batch))
        after_steps, labels = self.upper.arena.remembers_freed, batch.labels(self.lower.cell) if self.labelled else ()
        return CopyPlan(self._number, Direction.LOAD, batch.units(), batch.size_bytes, after_steps, labels)

    # landing --------------------------------------------------------------------------------------------------------

    def landed(self) -> None:
        """Publish the oldest flight in the upper tier."""
        load, batch = self._flights.popleft()
        load.in_flight -= 1
        load.left_bytes -= batch.size_bytes
        self._in_flight_bytes -= batch.size_bytes
        for cell in batch.cells:
            if load.broken:
                # The cells above it were not loaded.
                if cell.upper is not None:
                    self.upper.arena.release(Kind.PAGE, cell.upper)
                continue
            node = self.upper.publish(cell.key, load.tip, cell.upper)
            before, load.tip = load.tip, node
            self.upper.trie.pin(node)
            self.upper.unpin(before)
        if batch.point is not None:
            if load.broken:
                release_point(self.upper, batch.point.upper)
            else:
                hand_over(self.upper, batch.point, batch.point.upper)
        self.bytes += batch.size_bytes
        if load.planned and not load.in_flight:
            self._end(load)

    def failed(self) -> None:
        """Give up the oldest flight, whose copies could not be made: what the lower tier has is damaged."""
        load, batch = self._flights.popleft()
        load.in_flight -= 1
        self._in_flight_bytes -= batch.size_bytes
        for cell in batch.cells:
            if cell.upper is not None:
                self.upper.arena.release(Kind.PAGE, cell.upper)
        if batch.point is not None:
            release_point(self.upper, batch.point.upper)
            self.lower.drop_point(load.source)
        self.damaged.update(cell.key for cell in batch.cells)
        load.planned = load.broken = True
        if not load.in_flight:
            self._end(load)

    def _end(self, load: Load) -> None:
        del self._active[load.source.key]
        self.upper.unpin(load.tip)
        release_point(self.lower, load.point)
        self.lower.unpin(load.source)
        if load.broken and self.damaged:
            bad = [depth for depth, key in enumerate(load.keys, 1) if key in self.damaged]
            if bad:
                self.damaged.difference_update(self.lower.drop_end(load.source, bad[0]))

    # audit ----------------------------------------------------------------------------------------------------------

    def held(self, lower: bool) -> Iterator[tuple[Kind, int]]:
        """Yield the units that loads own in one of the tiers, once for each ownership."""
        if not lower:
            for _, batch in self._flights:
                yield from held_by(batch, lower=False)
            return
        for load in self._active.values():
            if load.point.slot is not None:
                yield Kind.STATE, load.point.slot
            for page in load.point.window:
                yield Kind.WINDOW, page

    def upper_pins(self) -> list[Node]:
        return [load.tip for load in self._active.values() if load.tip is not None]

    def lower_pins(self) -> list[Node]:
        return [load.source for load in self._active.values()]
