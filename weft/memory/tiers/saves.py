"""Copies what the upper tier keeps to the lower one, so that evicting it there loses nothing.

A path is saved when it becomes a resume point, long before its eviction: pages and checkpoints never change, so a copy
is right for ever, and eviction never waits for one. Candidates, which nothing has wanted yet, are not saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from weft.base.copies import CopyPlan, Direction
from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.keys import Key
from weft.memory.kinds import Kind
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

# Paths that wait to be saved; beyond it, the oldest is dropped.
MOST_OFFERED = 4096
# The anchor of a path whose copies have failed: no cell has this key.
NOWHERE = b""


class Saving:
    """One path on its way down. `tip` is its deepest cell that the lower tier has, pinned there.

    `anchor` is the key above the first missing cell: it may itself be on its way, in an earlier copy.
    """

    __slots__ = ("anchor", "failed", "in_flight", "keys", "next", "planned", "root", "tip")

    def __init__(self, keys: list[Key], anchor: Key | None, root: Key) -> None:
        self.keys = keys  # of the missing cells, then of the path's end, once more, for its point
        self.anchor = anchor
        self.root = root  # of the path's first cell
        self.next = 0
        self.tip: Node | None = None
        self.in_flight = 0
        self.planned = False
        self.failed = False


class Saves:
    """`chunk_bytes` go into one plan, and up to `most_bytes` are in flight."""

    def __init__(self, upper: Cache, lower: Cache, chunk_bytes: int, most_bytes: int) -> None:
        self.upper = upper
        self.lower = lower
        self.bytes = 0
        self.dropped = 0
        # Whether plans say what each unit is, and of which tenant, by the key of a path's first cell.
        self.labelled = False
        self.tenants: dict[Key, bytes] = {}
        self.chunk_bytes = chunk_bytes
        self.most_bytes = most_bytes
        self._offered: deque[Key] = deque()
        self._active: deque[Saving] = deque()
        self._under_way: set[Key] = set()
        self._flights: deque[tuple[Saving, CopyBatch]] = deque()
        self._in_flight_bytes = 0
        self._number = 0
        self._forgetting = False

    @property
    def waiting(self) -> bool:
        """Whether there is more to plan."""
        return bool(self._offered) or self._forgetting or any(not saving.planned for saving in self._active)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def offer(self, key: Key) -> None:
        """Save the path to a cell of the upper tier, with its resume point; ignored if it is saved or a candidate."""
        node = self.upper.trie.nodes.get(key)
        if node is None or (node.resume is not None and node.resume.origin is Origin.CANDIDATE):
            return
        saved = self.lower.trie.nodes.get(key)
        if saved is not None and (saved.resume is not None or node.resume is None):
            return
        self._offered.append(key)
        if len(self._offered) > MOST_OFFERED:
            self._offered.popleft()
            self.dropped += 1

    def forget(self) -> None:
        """Let a tier that outlives the process forget what it has just freed, even if nothing is saved any more."""
        self._forgetting = self.labelled and bool(self.lower.arena.freed)

    # planning -------------------------------------------------------------------------------------------------------

    def plan(self) -> CopyPlan | None:
        """Return the next copies, or None if there is nothing to save or enough in flight."""
        if self._forgetting:
            self._forgetting = False
            nothing = Saving([], None, NOWHERE)
            nothing.planned = True
            self._active.append(nothing)
            return self._launch(nothing, CopyBatch())
        while self._in_flight_bytes < self.most_bytes:
            saving = self._next()
            if saving is None:
                return None
            batch = self._fill(saving)
            if saving.planned and not saving.in_flight and not (batch.cells or batch.point):
                self._end(saving)
            elif batch.cells or batch.point:
                return self._launch(saving, batch)
        return None

    def _next(self) -> Saving | None:
        for saving in self._active:
            if not saving.planned:
                return saving
        while self._offered:
            node = self.upper.trie.nodes.get(self._offered.popleft())
            if node is None:
                self.dropped += 1
                continue
            return self._begin(node)
        return None

    def _begin(self, node: Node) -> Saving:
        missing: list[Key] = []
        above: Node | None = node
        while above is not None and above.key not in self.lower.trie.nodes and above.key not in self._under_way:
            missing.append(above.key)
            above = above.parent
        missing.reverse()
        saving = Saving([*missing, node.key], None if above is None else above.key, path(node)[0].key)
        self._under_way.update(missing)
        if saving.anchor is not None and saving.anchor in self.lower.trie.nodes:
            self._hold(saving, self.lower.trie.nodes[saving.anchor])
        self._active.append(saving)
        return saving

    def _fill(self, saving: Saving) -> CopyBatch:
        batch, page_bytes = CopyBatch(), max(1, self.lower.valuation.page_bytes)
        while batch.size_bytes < self.chunk_bytes and not saving.planned:
            node = self.upper.trie.nodes.get(saving.keys[saving.next])
            if node is None:
                saving.planned, saving.failed = True, True
                self.dropped += 1
            elif saving.next == len(saving.keys) - 1:
                saving.planned = True
                self._add_point(batch, node)
            elif self._add_cell(batch, node):
                saving.next += 1
                batch.size_bytes += page_bytes
            else:
                saving.planned, saving.failed = True, True
                self.dropped += 1
        return batch

    def _add_cell(self, batch: CopyBatch, node: Node) -> bool:
        if node.page is None:
            batch.cells.append(CellCopy(node.key, None, 0, None, None))
            return True
        page = self.lower.take(Kind.PAGE)
        if page is None:
            return False
        self.upper.arena.share(Kind.PAGE, node.page)
        above = None if node.parent is None else node.parent.key
        batch.cells.append(CellCopy(node.key, above, node.depth * self.lower.cell, node.page, page))
        return True

    def _add_point(self, batch: CopyBatch, node: Node) -> None:
        point, saved = node.resume, self.lower.trie.nodes.get(node.key)
        if point is None or (saved is not None and saved.resume is not None):
            return
        position = node.depth * self.upper.cell
        units = take_point(self.lower, position, len(point.window), Cache.take)
        if units is None:
            self.dropped += 1
            return
        own = PointUnits(point.slot, point.window)
        share_point(self.upper, own)
        batch.point = PointCopy(node.key, position, point.origin, own, units)
        batch.size_bytes += self.lower.point_bytes

    def _launch(self, saving: Saving, batch: CopyBatch) -> CopyPlan:
        self._number += 1
        saving.in_flight += 1
        self._in_flight_bytes += batch.size_bytes
        self._flights.append((saving, batch))
        if not self.labelled:
            return CopyPlan(self._number, Direction.SAVE, batch.units(), batch.size_bytes)
        cleared = tuple(self.lower.arena.freed)
        self.lower.arena.freed.clear()
        batch.tenant = self.tenants.get(saving.root, b"")
        labels = batch.labels(self.lower.cell)
        return CopyPlan(self._number, Direction.SAVE, batch.units(), batch.size_bytes, labels=labels, cleared=cleared)

    # landing --------------------------------------------------------------------------------------------------------

    def failed(self) -> None:
        """Give up the oldest flight, whose copies could not be made."""
        saving, batch = self._flights[0]
        # Without the cells above it, nothing of this path is entered from here on.
        self.lower.unpin(saving.tip)
        saving.tip, saving.anchor = None, NOWHERE
        saving.planned = saving.failed = True
        self.dropped += 1
        if batch.point is not None:
            release_point(self.upper, batch.point.upper)
            release_point(self.lower, batch.point.lower)
            batch.point = None
        self.landed()

    def landed(self) -> None:
        """Publish the oldest flight in the lower tier, and release what it read."""
        saving, batch = self._flights.popleft()
        saving.in_flight -= 1
        self._in_flight_bytes -= batch.size_bytes
        for cell in batch.cells:
            self._land_cell(saving, cell)
        if batch.point is not None:
            release_point(self.upper, batch.point.upper)
            hand_over(self.lower, batch.point, batch.point.lower)
        self.bytes += batch.size_bytes
        if saving.planned and not saving.in_flight:
            self._end(saving)

    def _land_cell(self, saving: Saving, cell: CellCopy) -> None:
        if cell.upper is not None:
            self.upper.arena.release(Kind.PAGE, cell.upper)
        self._under_way.discard(cell.key)
        if saving.tip is None and saving.anchor is not None:
            # The cells above were never saved, so no lookup could reach this one.
            if cell.lower is not None:
                self.lower.arena.release(Kind.PAGE, cell.lower)
            return
        node = self.lower.publish(cell.key, saving.tip, cell.lower)
        self._hold(saving, node)
        for other in self._active:
            if other.tip is None and other.anchor == cell.key:
                self._hold(other, node)

    def _hold(self, saving: Saving, node: Node) -> None:
        """Pin the deepest saved cell of a path, so that the lower tier does not evict what is about to be extended."""
        before, saving.tip = saving.tip, node
        self.lower.trie.pin(node)
        self.lower.unpin(before)

    def _end(self, saving: Saving) -> None:
        self._active.remove(saving)
        self._under_way.difference_update(saving.keys[saving.next :])
        self.lower.unpin(saving.tip)

    # audit ----------------------------------------------------------------------------------------------------------

    def held(self, lower: bool) -> Iterator[tuple[Kind, int]]:
        """Yield the units that flights own in one of the tiers, once for each ownership."""
        for _, batch in self._flights:
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
