"""Copies paths of the upper tier to the lower one: missing cells from the root down, then the resume point.

Pages and checkpoints never change, so a copy is right for ever. `demotion.py` chooses what is copied and when; here it
is copied, many paths in one plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.base.copies import CopyPlan, Direction
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.erasing import ErasedPart, Erasing
from weft.memory.tiers.units import (
    CellCopy,
    CopyBatch,
    PointCopy,
    PointUnits,
    hand_over,
    release_point,
    share_point,
    take_point,
)
from weft.memory.trie import Node, path

# No cell has this key.
NOWHERE = b""


class Saving:
    """One path on its way down. `tip` is its deepest cell that the lower tier has, pinned there.

    `anchor` is the key above the first missing cell: it may itself be on its way, in an earlier copy. In the lower
    tier, only entries worth less than `value` make room for it. `done` is called when its last copy has landed.
    """

    __slots__ = ("anchor", "done", "in_flight", "keys", "lost", "next", "planned", "tip", "value")

    def __init__(self, keys: list[Key], anchor: Key | None, value: float | None, done: Callable[[], None]) -> None:
        self.keys = keys  # of the missing cells, then of the path's end, once more, for its point
        self.anchor = anchor
        self.value = value
        self.done = done
        self.next = 0
        self.tip: Node | None = None
        self.in_flight = 0
        self.planned = False
        self.lost = False  # it has failed or was given up: nothing of it is entered from here on


@dataclass(slots=True)
class SaveFlight:
    """The copies of one plan: parts of several paths, or what is erased."""

    parts: list[tuple[Saving, CopyBatch]] = field(default_factory=list)
    size_bytes: int = 0
    erased: ErasedPart | None = None


class Saves:
    """`chunk_bytes` go into one plan, and up to `most_bytes` are in flight.

    `labelled`: plans say what each unit is, and of which tenant. `saved` is called with the key of a path whose copies
    have ended.
    """

    def __init__(
        self,
        upper: Cache,
        lower: Cache,
        chunk_bytes: int,
        most_bytes: int,
        labelled: bool = False,
        tenant_of: Callable[[Node], bytes] = lambda node: b"",
        saved: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self.upper = upper
        self.lower = lower
        self.bytes = 0
        # Paths that were evicted before they were saved, failed, or found no room among more valuable ones.
        self.dropped = 0
        self.labelled = labelled
        self.tenant_of = tenant_of
        self.saved = saved
        # Keys of cells whose copies in the lower tier are damaged: they are saved again.
        self.damaged: set[Key] = set()
        self.chunk_bytes = chunk_bytes
        self.most_bytes = most_bytes
        self.in_flight_bytes = 0
        self._active: dict[Saving, None] = {}
        # Keys of cells that will be published, if nothing fails.
        self.under_way: set[Key] = set()
        # Paths whose first missing cell is below one that is still under way, by its key.
        self._anchored: dict[Key, list[Saving]] = {}
        self._flights: deque[SaveFlight] = deque()
        self._number = 0
        self.erasing = Erasing(lower.arena)
        self._forgetting = False

    @property
    def waiting(self) -> bool:
        """Whether there is more to plan of what was begun."""
        return self._forgetting or self.erasing.waiting or any(not saving.planned for saving in self._active)

    @property
    def moving(self) -> bool:
        """Whether paths are on their way down."""
        return bool(self._active)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def has(self, node: Node) -> bool:
        """Return whether the lower tier has all of what a cell of the upper one stands for."""
        saved = self.lower.trie.nodes.get(node.key)
        return saved is not None and node.key not in self.damaged and (saved.resume is not None or node.resume is None)

    def forget(self) -> None:
        """Let a tier that outlives the process forget what it has just freed, even if nothing is saved any more."""
        if self.labelled and self.lower.arena.freed:
            self._forgetting = True

    def abandon(self) -> None:
        """Give up all paths on their way down. Copies under way land, and nothing of them is entered."""
        for saving in list(self._active):
            self._lose(saving)
            if not saving.in_flight:
                self._end(saving)

    def _lose(self, saving: Saving) -> None:
        self.lower.unpin(saving.tip)
        saving.tip, saving.lost, saving.planned = None, True, True

    # planning -------------------------------------------------------------------------------------------------------

    def plan(self, more: Callable[[], bool]) -> CopyPlan | None:
        """Return the next copies, or None if there is nothing to save or enough in flight.

        `more` begins one more path, if there is one that should be saved now.
        """
        self.erasing.note_evicted()
        full = self.in_flight_bytes >= self.most_bytes
        part = self.erasing.next_part(0 if full else self.chunk_bytes)
        if part is not None:
            return self._launch(SaveFlight(size_bytes=part.size_bytes, erased=part))
        if full or self.erasing.marks_waiting:
            return None
        flight = SaveFlight()
        while flight.size_bytes < self.chunk_bytes:
            saving = self._unplanned() or (self._unplanned() if more() else None)
            if saving is None:
                break
            batch = self._fill(saving, self.chunk_bytes - flight.size_bytes)
            if batch.cells or batch.point:
                saving.in_flight += 1
                flight.parts.append((saving, batch))
                flight.size_bytes += batch.size_bytes
            elif saving.planned and not saving.in_flight:
                self._end(saving)
        if not flight.parts and not self._forgetting:
            return None
        return self._launch(flight)

    def _unplanned(self) -> Saving | None:
        # What is planned was begun before, so only the last one may be unplanned.
        last = next(reversed(self._active), None)
        return last if last is not None and not last.planned else None

    def begin(self, node: Node, value: float | None, done: Callable[[], None]) -> None:
        """Save the path to a cell of the upper tier, with its resume point, if the lower tier has room for `value`."""
        missing: list[Key] = []
        above: Node | None = node
        nodes = self.lower.trie.nodes
        # Without damage, a path is missing from some cell on; with it, everything from the first damaged cell on is.
        broken = self._first_damaged(node) if self.damaged else 0
        while above is not None and (above.key not in nodes or above.depth >= broken > 0):
            if above.key in self.under_way:
                break
            missing.append(above.key)
            above = above.parent
        missing.reverse()
        saving = Saving([*missing, node.key], None if above is None else above.key, value, done)
        self.under_way.update(missing)
        if saving.anchor is not None:
            if saving.anchor in nodes and saving.anchor not in self.under_way:
                self._hold(saving, nodes[saving.anchor])
            else:
                self._anchored.setdefault(saving.anchor, []).append(saving)
        self._active[saving] = None

    def _first_damaged(self, node: Node) -> int:
        """Return the depth of the first damaged cell on a path, or 0."""
        return next((each.depth for each in path(node) if each.key in self.damaged), 0)

    def _fill(self, saving: Saving, room_bytes: int) -> CopyBatch:
        batch, page_bytes, nodes = CopyBatch(), max(1, self.lower.valuation.page_bytes), self.upper.trie.nodes
        last = len(saving.keys) - 1
        while batch.size_bytes < room_bytes and not saving.planned:
            node = nodes.get(saving.keys[saving.next])
            if node is None:
                saving.planned = True
                self.dropped += 1
            elif saving.next == last:
                saving.planned = True
                self._add_point(batch, node, saving.value)
            elif self._add_cell(batch, node, saving.value):
                saving.next += 1
                batch.size_bytes += page_bytes
            else:
                saving.planned = True
                self.dropped += 1
        return batch

    def _add_cell(self, batch: CopyBatch, node: Node, value: float | None) -> bool:
        if node.page is None:
            batch.cells.append(CellCopy(node.key, None, 0, None, None))
            return True
        page = self.lower.take_below(Kind.PAGE, value)
        if page is None:
            return False
        self.upper.arena.share(Kind.PAGE, node.page)
        above = None if node.parent is None else node.parent.key
        batch.cells.append(CellCopy(node.key, above, node.depth * self.lower.cell, node.page, page))
        return True

    def _add_point(self, batch: CopyBatch, node: Node, value: float | None) -> None:
        point, saved = node.resume, self.lower.trie.nodes.get(node.key)
        if point is None or (saved is not None and saved.resume is not None):
            return
        position = node.depth * self.upper.cell
        units = take_point(self.lower, position, len(point.window), lambda cache, kind: cache.take_below(kind, value))
        if units is None:
            self.dropped += 1
            return
        own = PointUnits(point.slot, point.window)
        share_point(self.upper, own)
        batch.point = PointCopy(node.key, position, point.origin, own, units, point.hits)
        batch.size_bytes += self.lower.point_bytes

    def _launch(self, flight: SaveFlight) -> CopyPlan:
        self._number += 1
        self.in_flight_bytes += flight.size_bytes
        self._flights.append(flight)
        units = tuple(unit for _, batch in flight.parts for unit in batch.units())
        if not self.labelled:
            return CopyPlan(self._number, Direction.SAVE, units, flight.size_bytes)
        self.erasing.note_evicted()
        cleared = tuple(self.lower.arena.freed)
        self.lower.arena.freed.clear()
        self._forgetting = False
        flight.erased = flight.erased or self.erasing.evicted_part()
        erased = flight.erased or ErasedPart()
        evicted = cleared if erased.evicted_too else ()
        for _, batch in flight.parts:
            first = batch.cells[0].key if batch.cells else batch.point.key if batch.point else NOWHERE
            node = self.upper.trie.nodes.get(first)
            batch.tenant = b"" if node is None else self.tenant_of(node)
        labels = tuple(label for _, batch in flight.parts for label in batch.labels(self.lower.cell))
        return CopyPlan(
            self._number,
            Direction.SAVE,
            units,
            flight.size_bytes,
            labels=labels,
            cleared=cleared,
            doomed=(*erased.doomed, *evicted),
            erased=(*erased.erased, *evicted),
        )

    # landing --------------------------------------------------------------------------------------------------------

    def failed(self, plan: CopyPlan) -> None:
        """Give up the oldest flight, whose copies could not be made. What it was to forget waits for the next plan."""
        arena = self.lower.arena
        arena.freed += [(kind, unit) for kind, unit in plan.cleared if arena.is_free(Kind(kind), unit)]
        flight = self._flights[0]
        if flight.erased is not None:
            self.erasing.give_up(flight.erased)
            flight.erased = None
        for saving, _ in flight.parts:
            # Without the cells above it, nothing of this path is entered from here on.
            self._lose(saving)
            self.dropped += 1
        self.landed()

    def landed(self) -> None:
        """Publish the oldest flight in the lower tier, and release what it read."""
        flight = self._flights.popleft()
        self.in_flight_bytes -= flight.size_bytes
        if flight.erased is not None:
            self.erasing.landed(flight.erased)
        self.bytes += flight.size_bytes if flight.parts else 0
        for saving, batch in flight.parts:
            saving.in_flight -= 1
            self._land(saving, batch)
            if saving.planned and not saving.in_flight:
                self._end(saving)

    def _land(self, saving: Saving, batch: CopyBatch) -> None:
        tip = saving.tip
        for cell in batch.cells:
            if cell.upper is not None:
                self.upper.arena.release(Kind.PAGE, cell.upper)
            self.under_way.discard(cell.key)
            if saving.lost or (tip is None and saving.anchor is not None):
                # The cells above were never saved, so no lookup could reach this one.
                if cell.lower is not None:
                    self.lower.arena.release(Kind.PAGE, cell.lower)
                continue
            tip = self._publish(cell, tip)
            for other in self._anchored.pop(cell.key, ()):
                if not other.lost:
                    self._hold(other, tip)
        if tip is not saving.tip and tip is not None:
            self._hold(saving, tip)
        if batch.point is not None:
            release_point(self.upper, batch.point.upper)
            if saving.lost:
                release_point(self.lower, batch.point.lower)
            else:
                hand_over(self.lower, batch.point, batch.point.lower)

    def _publish(self, cell: CellCopy, parent: Node | None) -> Node:
        if cell.key in self.damaged:
            self.damaged.discard(cell.key)
            known = self.lower.trie.nodes.get(cell.key)
            if known is not None:
                self.lower.replace_page(known, cell.lower)
                return known
        return self.lower.publish(cell.key, parent, cell.lower)

    def _hold(self, saving: Saving, node: Node) -> None:
        """Pin the deepest saved cell of a path, so that the lower tier does not evict what is about to be extended."""
        before, saving.tip = saving.tip, node
        self.lower.trie.pin(node)
        self.lower.unpin(before)

    def _end(self, saving: Saving) -> None:
        del self._active[saving]
        self.under_way.difference_update(saving.keys[saving.next :])
        self.lower.unpin(saving.tip)
        others = self._anchored.get(saving.anchor or NOWHERE)
        if others and saving in others:
            others.remove(saving)
        saving.done()
        self.saved(saving.keys[-1])

    # audit ----------------------------------------------------------------------------------------------------------

    def held(self, lower: bool) -> Iterator[tuple[Kind, int]]:
        """Yield the units that saves own in one of the tiers, once for each ownership."""
        yield from self.under_copy(lower)
        if lower:
            yield from self.erasing.held()

    def under_copy(self, lower: bool) -> Iterator[tuple[Kind, int]]:
        """Yield the units that flights read or write in one of the tiers."""
        for flight in self._flights:
            for _, batch in flight.parts:
                yield from held_by(batch, lower)

    def lower_pins(self) -> list[Node]:
        return [saving.tip for saving in self._active if saving.tip is not None]


def held_by(batch: CopyBatch, lower: bool) -> Iterator[tuple[Kind, int]]:
    for cell in batch.cells:
        page = cell.lower if lower else cell.upper
        if page is not None:
            yield Kind.PAGE, page
    if batch.point is not None:
        units = batch.point.lower if lower else batch.point.upper
        if units.slot is not None:
            yield Kind.STATE, units.slot
        for page in units.window:
            yield Kind.WINDOW, page
