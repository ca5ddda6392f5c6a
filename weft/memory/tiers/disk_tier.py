"""The disk tier: a cache whose units lie in a file, restored from its headers, and the copies from and to it.

No torch: `units` gives the bytes of a unit in the tier above.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.base.errors import CopyFailed, InvalidOption
from weft.base.grid import first_window_cell
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.disk_file import DamagedUnit, DiskFile
from weft.memory.tiers.disk_format import UnitHeader

READERS = 4
WAIT_SECONDS = 1e-3
# With fewer units than this for each reader, one reads them all.
LEAST_UNITS = 4


def check_model(spec: MemorySpec) -> None:
    """Raise if the headers of a model's units do not identify its cells."""
    if not spec.page_bytes:
        raise InvalidOption("disk", "needs a model with full attention; this one has none")


def disk_cache(spec: MemorySpec, file: DiskFile, eviction: str, tenancy: Tenancy) -> Cache:
    """Return the tier of a file, with all units that were found whole in it."""
    layout = file.layout
    cache = Cache(spec, Arena(layout.padded, layout.slabs * layout.slab_bytes, remember_freed=True), eviction)
    by_kind: dict[Kind, list[UnitHeader]] = {kind: [] for kind in layout.unit_bytes}
    for header in file.found:
        by_kind[header.kind].append(header)
    for header in sorted(by_kind[Kind.PAGE], key=lambda each: each.position):
        _restore_page(cache, header)
        if header.parent is None:
            tenancy.note([header.key], partial(_tenant, header))
    windows: dict[Key, list[UnitHeader]] = {}
    for header in by_kind.get(Kind.WINDOW, ()):
        windows.setdefault(header.key, []).append(header)
    if Kind.STATE in by_kind:
        for header in by_kind[Kind.STATE]:
            _restore_point(cache, header.key, header, windows.get(header.key, []))
    else:
        for key, pages in windows.items():
            _restore_point(cache, key, None, pages)
    for node in list(cache.trie.nodes.values()):
        cache.valuation.offer(node)
    return cache


def _tenant(header: UnitHeader) -> bytes:
    return header.tenant


def _restore_page(cache: Cache, header: UnitHeader) -> None:
    parent = None if header.parent is None else cache.trie.nodes.get(header.parent)
    depth = 1 if parent is None else parent.depth + 1
    orphan = header.parent is not None and parent is None
    if orphan or header.key in cache.trie.nodes or depth * cache.cell != header.position:
        return
    if cache.arena.claim(Kind.PAGE, header.unit):
        cache.publish(header.key, parent, header.unit)


def _restore_point(cache: Cache, key: Key, state: UnitHeader | None, window: list[UnitHeader]) -> None:
    node, spec = cache.trie.nodes.get(key), cache.spec
    if node is None or node.resume is not None:
        return
    position = node.depth * cache.cell
    first = first_window_cell(position, spec.window, spec.cell) if spec.window else node.depth
    ends = [cache.cell * (depth + 1) for depth in range(first, node.depth)]
    pages = sorted(window, key=lambda each: each.position)
    if [each.position for each in pages] != ends or (state is not None and state.position != position):
        return
    headers = [*([] if state is None else [state]), *pages]
    claimed = [each for each in headers if cache.arena.claim(each.kind, each.unit)]
    if len(claimed) == len(headers):
        slot = None if state is None else state.unit
        if slot is not None:
            cache.written_for[slot] = position
        cache.keep(key, slot, tuple(each.unit for each in pages))
        cache.explain(key, headers[0].origin)
    # The point has its own share of what it keeps; the rest is free again.
    for each in claimed:
        if each.kind is Kind.STATE:
            cache.release_slot(each.unit)
        else:
            cache.arena.release(each.kind, each.unit)


@dataclass(frozen=True, slots=True)
class DiskFlight:
    """Reads or writes under way in threads; each returns its seconds."""

    parts: tuple[Future[float], ...]


class DiskCopies:
    """Reads and writes units in threads: one writer, so that writes keep their order, and several readers."""

    def __init__(self, file: DiskFile, units: Callable[[Kind, int], memoryview]) -> None:
        self.file = file
        # Measured by the first loads.
        self.load_bytes_per_second: float | None = None
        self._units = units
        self._writer = ThreadPoolExecutor(1, "weft-disk-writer")
        self._readers = ThreadPoolExecutor(READERS, "weft-disk-reader")

    def copy(self, plan: CopyPlan) -> DiskFlight:
        """Begin the copies of a plan."""
        if plan.direction is Direction.SAVE:
            return DiskFlight((self._writer.submit(self._save, plan),))
        units = list(zip(plan.units, plan.labels, strict=True))
        share = max(LEAST_UNITS, -(-len(units) // READERS))
        parts = [units[first : first + share] for first in range(0, len(units), share)]
        return DiskFlight(tuple(self._readers.submit(self._load, part) for part in parts))

    def copied(self, flight: DiskFlight, wait: bool) -> float | None:
        """Return the seconds that the copies took, or None if under way; with `wait`, wait a little for them."""
        if wait:
            wait_for(flight.parts, WAIT_SECONDS)
        if not all(part.done() for part in flight.parts):
            return None
        failures = [error for part in flight.parts if (error := part.exception()) is not None]
        for error in failures:
            if not isinstance(error, OSError | DamagedUnit):
                raise error
        if failures:
            raise CopyFailed(str(failures[0])) from failures[0]
        return max((part.result() for part in flight.parts), default=0.0)

    def close(self) -> None:
        """Finish what is under way, make it durable and unlock the file."""
        self._writer.shutdown()
        self._readers.shutdown()
        self.file.close()

    def _save(self, plan: CopyPlan) -> float:
        began = perf_counter()
        cleared = [(Kind(kind), unit) for kind, unit in plan.cleared]
        units = [
            (header_of(copy, label), self._units(Kind(copy.kind), copy.upper))
            for copy, label in zip(plan.units, plan.labels, strict=True)
        ]
        self.file.write(units, cleared, [(Kind(kind), unit) for kind, unit in plan.erased])
        return perf_counter() - began

    def _load(self, units: list[tuple[UnitCopy, UnitLabel]]) -> float:
        began = perf_counter()
        for (kind, upper, lower), label in units:
            self.file.read(Kind(kind), lower, label.key, self._units(Kind(kind), upper))
        return perf_counter() - began


def header_of(copy: UnitCopy, label: UnitLabel) -> UnitHeader:
    """Return the header of a unit that is about to be written, without what is measured then."""
    tenant = label.tenant.ljust(16, b"\0")
    return UnitHeader(
        Kind(copy.kind),
        copy.lower,
        label.position,
        label.key,
        label.parent,
        tenant,
        Origin(label.origin),
        size=0,
        checksum=0,
    )
