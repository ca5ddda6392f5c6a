"""Carries units between the device and a small area of host memory: out to a file, in from one, or to compare them.

A carriage plans one batch at a time, and takes it in when the device has copied it. What it reads is pinned, or shared,
until then. What it brings in is in no cache until all of it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from weft.base.copies import CopyPlan, Direction, UnitCopy
from weft.base.errors import RequestError
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.keys import Key
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.saved.file import PrefixReader, PrefixWriter, Tokens, UnitPlace, page_places, point_places
from weft.memory.saved.padding import clear_gaps, gaps_of
from weft.memory.spec import MemorySpec
from weft.memory.tiers.copies import units_of
from weft.memory.tiers.exchange.departures import area_bytes
from weft.memory.tiers.units import PointUnits, release_point, share_point, take, take_point
from weft.memory.trie import Node, path

# About this many bytes are copied, read or written in a step: a few milliseconds.
STEP_BYTES = 8 << 20
NO_ROOM = "there is no memory for the file: running requests and retained prompts need it; try again later"
OTHER_STATES = "the file has other states than its tokens compute, so nothing of it was imported"
Unit = tuple[UnitPlace, Origin, int]


def kept_sizes(spec: MemorySpec) -> dict[Kind, int]:
    """Return the bytes of the units that a prefix has."""
    return {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL}


class Area:
    """The host memory through which units pass: room for some pages and a resume point of two prefixes at once."""

    def __init__(self, spec: MemorySpec) -> None:
        self.sizes = kept_sizes(spec)
        self.pages = max(1, STEP_BYTES // self.sizes.get(Kind.PAGE, STEP_BYTES))
        self.size_bytes = 2 * area_bytes(spec, self.pages)
        self.gaps = gaps_of(spec)
        self._arena = Arena(self.sizes, self.size_bytes)
        self._memory: memoryview | None = None

    def use(self, memory: memoryview) -> None:
        self._memory = memory

    def view(self, copy: UnitCopy) -> memoryview:
        """Return the bytes of a unit that was copied here, or is about to leave."""
        assert self._memory is not None
        return units_of(self._memory, self.sizes)(Kind(copy.kind), copy.lower)

    def cleared(self, copy: UnitCopy) -> memoryview:
        """Return the bytes of a unit that was copied here, without what another one left between its layers."""
        found = self.view(copy)
        clear_gaps(found, self.gaps[Kind(copy.kind)])
        return found

    def copies(self, units: Sequence[Unit]) -> list[UnitCopy]:
        """Return the copies of units from or to places of this area."""
        return [UnitCopy(place.kind.value, unit, self._take(place.kind)) for place, _, unit in units]

    def _take(self, kind: Kind) -> int:
        unit = self._arena.take(kind)
        assert unit is not None, "the area has room for a batch"
        return unit

    def release(self, copies: Sequence[UnitCopy]) -> None:
        for copy in copies:
            self._arena.release(Kind(copy.kind), copy.lower)


class PromptCarriage(Protocol):
    """`plan` returns the next batch, None if all is done. It and `landed` raise `RequestError` if they cannot go on."""

    direction: Direction

    def plan(self) -> Sequence[UnitCopy] | None: ...
    def landed(self, copies: Sequence[UnitCopy]) -> None: ...


def point_units(spec: MemorySpec, keys: Sequence[Key], position: int, origin: Origin, units: PointUnits) -> list[Unit]:
    slots = [] if units.slot is None else [units.slot]
    places = point_places(spec, keys, position)
    return [(place, origin, unit) for place, unit in zip(places, [*slots, *units.window], strict=True)]


def page_batches(
    spec: MemorySpec, keys: Sequence[Key], pages: Sequence[int | None], most: int, first: int = 0
) -> Iterator[list[Unit]]:
    """Yield the pages of a path from cell `first` on, up to `most` at a time."""
    wanted = zip(page_places(spec, keys)[first:], pages[first:], strict=False)
    found = ((place, Origin.REGULAR, unit) for place, unit in wanted if unit is not None)
    while batch := list(islice(found, most)):
        yield batch


class KeptPath:
    """A path of the cache that is pinned, and resume points that are shared, whatever is evicted meanwhile."""

    def __init__(self, cache: Cache, node: Node, end: PointUnits | None, inner: bool) -> None:
        """`end` is the resume point where a sequence has just ended, if it has one.

        With `inner`, those above it too, except most of the many that were only kept because memory was free.
        """
        self.cache, self.node = cache, node
        cache.trie.pin(node)
        self.pages = [each.page for each in path(node)]
        self.points: list[tuple[int, Origin, PointUnits]] = []
        for each in path(node)[:-1] if inner else ():
            # The same prompt, sent again, may resume one cell before its end.
            lasts = each.depth + 1 >= node.depth
            if each.resume is not None and (lasts or each.resume.origin is not Origin.CANDIDATE):
                units = PointUnits(each.resume.slot, each.resume.window)
                self.points.append((each.depth * cache.cell, each.resume.origin, units))
        if end is not None:
            self.points.append((node.depth * cache.cell, Origin.PROMPT_END, end))
        for _, _, units in self.points:
            share_point(cache, units)

    def held(self) -> Iterator[tuple[Kind, int]]:
        for _, _, units in self.points:
            yield from units_held(units)

    def count(self, kind: Kind) -> int:
        """Return how many units it owns besides those of the trie, which counts its cells."""
        return count_in([units for _, _, units in self.points], kind)

    def release(self) -> None:
        self.cache.unpin(self.node)
        for _, _, units in self.points:
            release_point(self.cache, units)
        self.points.clear()


class LoosePath:
    """Units of a path that is in no cache yet. `publish` hands them over, `release` gives them up."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.pages: list[int] = []
        self.points: dict[int, PointUnits] = {}

    def held(self) -> Iterator[tuple[Kind, int]]:
        yield from ((Kind.PAGE, page) for page in self.pages)
        for units in self.points.values():
            yield from units_held(units)

    def publish(self, keys: Sequence[Key], points: Sequence[int]) -> None:
        """Publish the first cells under these keys, with their resume points at some positions; share the units."""
        tip: Node | None = None
        for depth, key in enumerate(keys, 1):
            page = self.pages[depth - 1] if self.pages else None
            if page is not None:
                self.cache.arena.share(Kind.PAGE, page)
            tip = self.cache.publish(key, tip, page)
            if depth * self.cache.cell in points:
                units = self.points[depth * self.cache.cell]
                self.cache.keep(key, units.slot, units.window)
                self.cache.explain(key, Origin.IMPORTED)

    def count(self, kind: Kind) -> int:
        return len(self.pages) if kind is Kind.PAGE else count_in(self.points.values(), kind)

    def release(self) -> None:
        for page in self.pages:
            self.cache.arena.release(Kind.PAGE, page)
        for units in self.points.values():
            release_point(self.cache, units)
        self.pages.clear()
        self.points.clear()


def units_held(units: PointUnits) -> Iterator[tuple[Kind, int]]:
    if units.slot is not None:
        yield Kind.STATE, units.slot
    yield from ((Kind.WINDOW, page) for page in units.window)


def count_in(points: Iterable[PointUnits], kind: Kind) -> int:
    if kind is Kind.STATE:
        return sum(units.slot is not None for units in points)
    return sum(len(units.window) for units in points) if kind is Kind.WINDOW else 0


class OutgoingFile:
    """A path on its way to a file, which `close` completes."""

    direction = Direction.SAVE

    def __init__(self, area: Area, kept: KeptPath, keys: Sequence[Key], writer: PrefixWriter) -> None:
        self._area, self._writer = area, writer
        self._batches = self._all(kept, keys)
        self._batch: list[Unit] = []

    def _all(self, kept: KeptPath, keys: Sequence[Key]) -> Iterator[list[Unit]]:
        spec = kept.cache.spec
        yield from page_batches(spec, keys[: kept.node.depth], kept.pages, self._area.pages)
        for point in kept.points:
            yield point_units(spec, keys, *point)

    def plan(self) -> Sequence[UnitCopy] | None:
        self._batch = next(self._batches, [])
        return self._area.copies(self._batch) or None

    def landed(self, copies: Sequence[UnitCopy]) -> None:
        try:
            for (place, origin, _), copy in zip(self._batch, copies, strict=True):
                self._writer.add(place, origin, self._area.cleared(copy))
        except OSError as error:
            raise RequestError(f"the file cannot be written: {error.strerror}", 503) from None

    def close(self, tokens: Tokens, prompt: int) -> None:
        try:
            self._writer.close(tokens, prompt)
        except OSError as error:
            raise RequestError(f"the file cannot be written: {error.strerror}", 503) from None


class IncomingFile:
    """A file on its way into units of the device."""

    direction = Direction.LOAD

    def __init__(self, area: Area, cache: Cache, reader: PrefixReader) -> None:
        self._area, self._cache, self.reader = area, cache, reader
        self.loose = LoosePath(cache)
        self._places = reader.places()
        self._pages = next(self._places)

    def plan(self) -> Sequence[UnitCopy] | None:
        done = len(self.loose.pages)
        try:
            if done < len(self._pages):
                return self._read(self._take_pages(self._pages[done : done + self._area.pages]))
            places = next(self._places, None)
            return None if places is None else self._read(self._take_point(places))
        except OSError as error:
            raise RequestError(f"the file cannot be read: {error.strerror}", 503) from None

    def _take_pages(self, places: Sequence[UnitPlace]) -> list[Unit]:
        found: list[Unit] = []
        for place in places:
            unit = take(self._cache, Kind.PAGE)
            if unit is None:
                raise RequestError(NO_ROOM, 503)
            # Owned from here on, whatever fails.
            self.loose.pages.append(unit)
            found.append((place, Origin.IMPORTED, unit))
        return found

    def _take_point(self, places: Sequence[UnitPlace]) -> list[Unit]:
        position, window = places[-1].position, sum(place.kind is Kind.WINDOW for place in places)
        units = take_point(self._cache, position, window, take)
        if units is None:
            raise RequestError(NO_ROOM, 503)
        self.loose.points[position] = units
        found = [*([] if units.slot is None else [units.slot]), *units.window]
        return [(place, Origin.IMPORTED, unit) for place, unit in zip(places, found, strict=True)]

    def _read(self, units: Sequence[Unit]) -> Sequence[UnitCopy]:
        """Read units into the area."""
        copies = self._area.copies(units)
        try:
            for (place, _, _), copy in zip(units, copies, strict=True):
                self.reader.read(place, self._area.view(copy))
        except (OSError, RequestError):
            self._area.release(copies)
            raise
        return copies

    def landed(self, copies: Sequence[UnitCopy]) -> None:
        """Nothing: the units are published together, when all of them are there."""


class ByteComparison:
    """Units that were just computed, and those that a file has in their place: their bytes must be equal."""

    direction = Direction.SAVE

    def __init__(self, area: Area, computed: KeptPath, given: LoosePath, keys: Sequence[Key], first: int) -> None:
        """From cell `first` on; the keys are those of the file."""
        self._area = area
        self._batches = self._pairs(computed, given, keys[: computed.node.depth], first)

    def _pairs(
        self, computed: KeptPath, given: LoosePath, keys: Sequence[Key], first: int
    ) -> Iterator[tuple[list[Unit], list[Unit]]]:
        spec, most = computed.cache.spec, self._area.pages
        ours, theirs = (page_batches(spec, keys, each, most, first) for each in (computed.pages, given.pages))
        yield from zip(ours, theirs, strict=True)
        for position, origin, units in computed.points:
            if position in given.points:
                one, other = (point_units(spec, keys, position, origin, u) for u in (units, given.points[position]))
                yield one, other

    def plan(self) -> Sequence[UnitCopy] | None:
        pair = next(self._batches, None)
        return None if pair is None else [copy for side in pair for copy in self._area.copies(side)]

    def landed(self, copies: Sequence[UnitCopy]) -> None:
        half = len(copies) // 2
        for one, other in zip(copies[:half], copies[half:], strict=True):
            if not same_bytes(self._area.cleared(one), self._area.cleared(other)):
                raise RequestError(OTHER_STATES, 403)


def same_bytes(computed: memoryview, given: memoryview) -> bool:
    """Return whether a unit of a file has the bytes that were computed in its place."""
    return bytes(computed) == bytes(given)


def plan_of(number: int, carriage: PromptCarriage, copies: Sequence[UnitCopy], after_steps: bool) -> CopyPlan:
    """Return the copies of a batch as a plan for a device. Loads may have to wait for steps (`CopyPlan`)."""
    waits = after_steps and carriage.direction is Direction.LOAD
    return CopyPlan(number, carriage.direction, tuple(copies), 0, waits)
