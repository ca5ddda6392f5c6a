"""Units of memory under copy: taken, owned until the copy has landed, then handed over or released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weft.base.copies import UnitCopy, UnitLabel
from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.keys import Key
from weft.memory.kinds import Kind


@dataclass(frozen=True, slots=True)
class CellCopy:
    """A cell under copy. The pages are None for a model without full attention."""

    key: Key
    parent: Key | None
    position: int
    upper: int | None
    lower: int | None


@dataclass(frozen=True, slots=True)
class PointCopy:
    """A resume point under copy: state and window pages of one position travel together."""

    key: Key
    position: int
    origin: Origin
    upper: PointUnits
    lower: PointUnits
    hits: int = 0


@dataclass(frozen=True, slots=True)
class PointUnits:
    """The slot and the window pages of a resume point in one tier."""

    slot: int | None
    window: tuple[int, ...]


@dataclass(slots=True)
class CopyBatch:
    """The copies of one plan for one path, in order: cells from the root down, then the point."""

    tenant: bytes = b""
    cells: list[CellCopy] = field(default_factory=list)
    point: PointCopy | None = None
    size_bytes: int = 0

    def units(self) -> tuple[UnitCopy, ...]:
        found = [
            UnitCopy(Kind.PAGE, c.upper, c.lower) for c in self.cells if c.upper is not None and c.lower is not None
        ]
        if self.point is not None:
            found += point_copies(self.point.upper, self.point.lower)
        return tuple(found)

    def labels(self, cell: int) -> tuple[UnitLabel, ...]:
        """Return what each unit is; `cell` is the length of a cell."""
        origin = Origin.REGULAR.value
        found = [UnitLabel(c.key, c.parent, c.position, origin, self.tenant) for c in self.cells if c.upper is not None]
        point = self.point
        if point is None:
            return tuple(found)
        ends = [point.position] if point.upper.slot is not None else []
        count = len(point.upper.window)
        ends += [point.position - cell * (count - 1 - index) for index in range(count)]
        return tuple(found) + tuple(UnitLabel(point.key, None, end, point.origin.value, self.tenant) for end in ends)


def point_copies(upper: PointUnits, lower: PointUnits) -> list[UnitCopy]:
    """Return the copies of a resume point's units."""
    found = [] if upper.slot is None or lower.slot is None else [UnitCopy(Kind.STATE, upper.slot, lower.slot)]
    return found + [UnitCopy(Kind.WINDOW, a, b) for a, b in zip(upper.window, lower.window, strict=True)]


def take(cache: Cache, kind: Kind) -> int | None:
    """Return a unit of the upper tier to load into, evicting if necessary."""
    unit = cache.take(kind)
    if unit is not None and cache.arena.freed:
        # Paranoid mode would fill its bytes with NaN in the next step, after the copy.
        cache.arena.freed[:] = [each for each in cache.arena.freed if not _overlap(cache, each, (kind, unit))]
    return unit


def _overlap(cache: Cache, freed: tuple[str, int], taken: tuple[Kind, int]) -> bool:
    """Return whether two units share bytes: a slab may have held another kind before."""
    (first, end), (other, other_end) = (
        (unit * size, (unit + 1) * size)
        for size, unit in ((cache.arena.unit_bytes[Kind(kind)], unit) for kind, unit in (freed, taken))
    )
    return first < other_end and other < end


def take_point(
    cache: Cache, position: int, window: int, take: Callable[[Cache, Kind], int | None]
) -> PointUnits | None:
    """Return units for the resume point of a position with this many window pages, or None if there is no room."""
    slot, pages = None, list[int]()
    if Kind.STATE in cache.arena.unit_bytes:
        slot = take(cache, Kind.STATE)
        if slot is None:
            return None
        cache.written_for[slot] = position
    while len(pages) < window:
        page = take(cache, Kind.WINDOW)
        if page is None:
            release_point(cache, PointUnits(slot, tuple(pages)))
            return None
        pages.append(page)
    return PointUnits(slot, tuple(pages))


def share_point(cache: Cache, units: PointUnits) -> None:
    if units.slot is not None:
        cache.arena.share(Kind.STATE, units.slot)
    for page in units.window:
        cache.arena.share(Kind.WINDOW, page)


def release_point(cache: Cache, units: PointUnits) -> None:
    cache.release_slot(units.slot)
    for page in units.window:
        cache.arena.release(Kind.WINDOW, page)


def hand_over(cache: Cache, point: PointCopy, units: PointUnits) -> None:
    """Make a copied point a resume point of the cache, if its cell is there, and give up our ownership."""
    if point.key in cache.trie.nodes:
        cache.keep(point.key, units.slot, units.window)
        cache.explain(point.key, point.origin)
        cache.inherit(point.key, point.hits)
    release_point(cache, units)
