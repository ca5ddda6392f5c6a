"""Arrivals: a tier below the device that prefill engines fill, instead of saves from above.

Prefixes under way own the units that they are received into. Cells are published from the root down when their bytes
have arrived, and the resume point after all of them. Cells that the device or another tier has already are not sent:
here they are nodes without a page, and a path is loaded only if the device has the pages of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from weft.base.copies import CopyPlan
from weft.base.grid import first_window_cell, floor_to_grid
from weft.base.transfers import Offer, ReservedUnit
from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.link import LowerTier, TierLink
from weft.memory.tiers.units import PointCopy, PointUnits, hand_over, release_point, take_point
from weft.memory.trie import Node, resume_at_or_above

# What one transfer may have granted and not received: this share of what others leave of arrivals, and at least this
# many bytes. A prompt that is computed in one step is granted at once, because no unit of it is whole before the step's
# last layers. But it may wait in the queue of its engine before, and others with it.
WINDOW_SHARE = 1 / 4
WINDOW_BYTES = 64 << 20


class Incoming:
    """A prefix under way.

    cells: [0, published) are here   [published, reserved) may arrive   [reserved, end) are not granted yet
    """

    __slots__ = ("decided", "dropped", "end", "keys", "pages", "point", "published", "received", "reserved", "tip")

    def __init__(self, keys: list[Key], first: int) -> None:
        self.keys = keys
        self.published = self.reserved = first
        self.end = len(keys)
        self.tip: Node | None = None  # of the last published cell, pinned
        self.pages: dict[int, int] = {}  # reserved and not published, by cell
        self.point: PointUnits | None = None
        self.received: set[int] = set()
        # All of it is granted that is not here.
        self.decided = False
        # Nothing more is published: its prefix was dropped meanwhile, or another one has its keys in other places.
        self.dropped = False


class ArrivalsFull(Exception):
    """There is no memory for more of a prefix: all of it belongs to prefixes under way, or to loads."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Units for the pages of cells [first, end), and with `point` for the resume point."""

    first: int
    end: int
    point: bool
    units: list[ReservedUnit]


class ArrivalsLink(TierLink):
    """The device and the tier that prefill engines fill. Nothing is saved to it."""

    transient = True

    def __init__(self, level: int, upper: Cache, lower: Cache, tenancy: Tenancy) -> None:
        super().__init__(level, upper, LowerTier("arrivals", lower), tenancy.of)
        lower.trie.trusted = False
        self.tenancy = tenancy
        self.paged = Kind.PAGE in lower.arena.unit_bytes
        self.incoming: dict[int, Incoming] = {}
        self.window_bytes = max(WINDOW_BYTES, int(WINDOW_SHARE * lower.arena.slabs * lower.arena.slab_bytes))
        self.arrived_bytes = self.arrived_prefixes = self.refused = 0

    def plan_save(self, idle: bool = False) -> CopyPlan | None:
        return None

    def under_way(self) -> Iterable[Key]:
        return (incoming.keys[0] for incoming in self.incoming.values() if incoming.keys)

    def deepest(self, keys: list[Key], limit: int) -> Node | None:
        reusable = keys[: floor_to_grid(limit, self.lower.cell) // self.lower.cell]
        above = self.upper.trie.deepest(reusable)
        depth = self.reaches(reusable, 0 if above is None else above.depth)
        node = self.lower.trie.deepest(reusable[:depth])
        if not self.lower.point_bytes:
            return node
        point = resume_at_or_above(node)
        return None if point is None else point.node

    def reaches(self, keys: list[Key], first: int) -> int:
        """Return up to which cell the pages from cell `first` on are here."""
        nodes = self.lower.trie.nodes
        found = takewhile(lambda node: node is not None and self._has_page(node), map(nodes.get, keys[first:]))
        return first + sum(1 for _ in found)

    def _has_page(self, node: Node) -> bool:
        return node.page is not None or not self.paged

    # a prefix under way ---------------------------------------------------------------------------------------------

    def open(self, transfer: int, offer: Offer, known: int) -> str | None:
        """Expect a prefix whose first `known` cells need not be sent; return why it is refused, or None."""
        assert transfer not in self.incoming
        keys = list(offer.keys)
        arena = self.lower.arena
        size = (len(keys) - known) * self.lower.valuation.page_bytes + self.lower.point_bytes
        if size > arena.slabs * arena.slab_bytes // 2:
            self.refused += 1
            return f"the prefix has {size} bytes, and arrivals have room for {arena.slabs * arena.slab_bytes}"
        incoming = self.incoming[transfer] = Incoming(keys, known)
        if keys:
            self.tenancy.note(keys[0], lambda: offer.tenant)
        for key in keys[: known if self.paged else len(keys)]:
            # Cells without a page here: the device or another tier has them, or the model needs none.
            self._hold(incoming, self.lower.publish(key, incoming.tip, None))
        if not self.paged:
            incoming.published = incoming.reserved = incoming.end
        return None

    def reserve(self, transfer: int) -> Reservation | None:
        """Take memory for the next units of a prefix; return None if nothing more is to be granted now.

        Raises `ArrivalsFull`.
        """
        incoming, page_bytes = self.incoming[transfer], max(1, self.lower.valuation.page_bytes)
        first, most = incoming.reserved, max(1, self._window() // page_bytes)
        # Not for every unit that arrives.
        if incoming.decided or incoming.dropped or first - incoming.published > most // 2:
            return None
        end = min(incoming.end, incoming.published + most)
        incoming.decided = end == incoming.end
        if incoming.decided and self.wants_point(incoming):
            # Before the pages: a state may need a whole slab, which pages would scatter over.
            window = len(self._window_ends(end))
            incoming.point = take_point(self.lower, end * self.lower.cell, window, Cache.take)
            if incoming.point is None:
                raise ArrivalsFull
        units = [self._reserve_page(incoming) for _ in range(end - first)]
        if incoming.point is None:
            return Reservation(first, end, False, units)
        return Reservation(first, end, True, units + self._point_places(incoming))

    def _window(self) -> int:
        """Return how many bytes a transfer may have granted and not received now."""
        arena, pages = self.lower.arena, sum(len(each.pages) for each in self.incoming.values())
        left = arena.slabs * arena.slab_bytes - pages * self.lower.valuation.page_bytes
        return min(self.window_bytes, max(WINDOW_BYTES, int(WINDOW_SHARE * left)))

    def _reserve_page(self, incoming: Incoming) -> ReservedUnit:
        unit = self.lower.take(Kind.PAGE)
        if unit is None:
            raise ArrivalsFull
        cell = incoming.reserved
        incoming.pages[cell] = unit
        incoming.reserved += 1
        parent = incoming.keys[cell - 1] if cell else None
        return ReservedUnit(cell, Kind.PAGE.value, unit, incoming.keys[cell], parent, (cell + 1) * self.lower.cell)

    def wants_point(self, incoming: Incoming) -> bool:
        """Return whether a resume point at the end of a prefix is missing here and on the device."""
        if not self.lower.point_bytes or not incoming.end:
            return False
        known = [cache.trie.nodes.get(incoming.keys[-1]) for cache in (self.upper, self.lower)]
        return all(node is None or node.resume is None for node in known)

    def _window_ends(self, depth: int) -> list[int]:
        """Return where the window pages of a point end, in tokens."""
        spec, cell = self.lower.spec, self.lower.cell
        first = first_window_cell(depth * cell, spec.window, cell) if spec.window else depth
        return [cell * (each + 1) for each in range(first, depth)]

    def _point_places(self, incoming: Incoming) -> list[ReservedUnit]:
        point, end, key = incoming.point, incoming.end, incoming.keys[-1]
        assert point is not None
        found = []
        if point.slot is not None:
            found.append(ReservedUnit(end, Kind.STATE.value, point.slot, key, None, end * self.lower.cell))
        for index, (page, position) in enumerate(zip(point.window, self._window_ends(end), strict=True)):
            found.append(ReservedUnit(end + 1 + index, Kind.WINDOW.value, page, key, None, position))
        return found

    def received(self, transfer: int, place: int) -> None:
        """Publish what the unit of a place completes."""
        incoming = self.incoming[transfer]
        incoming.received.add(place)
        if incoming.dropped:
            return
        while incoming.published < incoming.reserved and incoming.published in incoming.received:
            cell = incoming.published
            known = self.lower.trie.nodes.get(incoming.keys[cell])
            if known is not None and known.parent is not incoming.tip:
                self._give_up(incoming)
                return
            incoming.published += 1
            self._publish(incoming, cell, incoming.pages.pop(cell))
        if incoming.published == incoming.end and incoming.point is not None and self._point_is_whole(incoming):
            point, incoming.point = incoming.point, None
            copy = PointCopy(
                incoming.keys[-1], incoming.end * self.lower.cell, Origin.PROMPT_END, PointUnits(None, ()), point
            )
            hand_over(self.lower, copy, point)
            self.arrived_bytes += self.lower.point_bytes

    def _publish(self, incoming: Incoming, cell: int, page: int) -> None:
        key = incoming.keys[cell]
        known = self.lower.trie.nodes.get(key)
        if known is not None and known.page is None:
            known.page = page
        else:
            known = self.lower.publish(key, incoming.tip, page)
        self._hold(incoming, known)
        self.arrived_bytes += self.lower.valuation.page_bytes

    def _point_is_whole(self, incoming: Incoming) -> bool:
        point = incoming.point
        assert point is not None
        places = [incoming.end] if point.slot is not None else []
        places += [incoming.end + 1 + index for index in range(len(point.window))]
        return incoming.received.issuperset(places)

    def complete(self, transfer: int) -> bool:
        """Return whether all of a prefix is published."""
        incoming = self.incoming[transfer]
        here = incoming.decided and incoming.published == incoming.end and incoming.point is None
        return here and not incoming.dropped

    def ended(self, transfer: int) -> None:
        """Forget a prefix that is no longer under way. What was published stays."""
        if transfer not in self.incoming:
            return
        self.arrived_prefixes += self.complete(transfer)
        incoming = self.incoming.pop(transfer)
        for page in incoming.pages.values():
            self.lower.arena.release(Kind.PAGE, page)
        if incoming.point is not None:
            release_point(self.lower, incoming.point)
        self.lower.unpin(incoming.tip)
        end = incoming.tip
        while end is not None and end.page is None and end.resume is None and self.lower.drop_end(end, end.depth):
            # Nothing arrived below it.
            end = end.parent

    def drop_incoming(self) -> None:
        """Publish nothing more of the prefixes that are under way, because prefixes are being dropped."""
        for incoming in self.incoming.values():
            self._give_up(incoming)

    def _give_up(self, incoming: Incoming) -> None:
        incoming.dropped = True
        self.lower.unpin(incoming.tip)
        incoming.tip = None

    def _hold(self, incoming: Incoming, node: Node) -> None:
        before, incoming.tip = incoming.tip, node
        self.lower.trie.pin(node)
        self.lower.unpin(before)

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"saved_bytes": self.arrived_bytes}

    # audit ----------------------------------------------------------------------------------------------------------

    def own_units(self) -> Iterator[tuple[Kind, int]]:
        for incoming in self.incoming.values():
            yield from ((Kind.PAGE, page) for page in incoming.pages.values())
            if incoming.point is not None:
                yield from ((Kind.WINDOW, page) for page in incoming.point.window)
                if incoming.point.slot is not None:
                    yield Kind.STATE, incoming.point.slot

    def own_pins(self) -> list[Node]:
        return [incoming.tip for incoming in self.incoming.values() if incoming.tip is not None]
