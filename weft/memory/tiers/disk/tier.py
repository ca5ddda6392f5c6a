"""The disk tier: a cache whose units lie in a file, and the copies from and to it.

No torch: `units` gives the bytes of a unit in the tier above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.base.errors import CopyFailed, InvalidOption
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk.file import DamagedUnit, DiskFile, Staging, Task, WantedUnit
from weft.memory.tiers.disk.format import UnitHeader

READERS = 8
# Threads for the parts of reads, and as many for those of writes: large units are cut into pieces, and those of a write
# go beside each other. Requests wait for reads, so these never wait behind the payloads of a save.
HELPERS = 8
WAIT_SECONDS = 1e-3


def check_model(spec: MemorySpec, name: str = "disk") -> None:
    """Raise if the headers of a model's units do not identify its cells; `name` is the option that needs it."""
    if not spec.page_bytes:
        raise InvalidOption(name, "needs a model with full attention; this one has none")


def disk_cache(spec: MemorySpec, file: DiskFile, eviction: str) -> Cache:
    """Return the tier of a file, still empty: `restoring.py` enters what the file holds."""
    layout = file.layout
    return Cache(spec, Arena(layout.padded, layout.slabs * layout.slab_bytes, remember_freed=True), eviction)


@dataclass(frozen=True, slots=True)
class ThreadedCopies:
    """Reads or writes under way in threads; each returns its seconds."""

    parts: tuple[Future[float], ...]

    def seconds(self, wait: bool, expected: tuple[type[Exception], ...]) -> float | None:
        """Return the seconds that they took, or None if under way; with `wait`, wait a little for them.

        Raises `CopyFailed` for `expected` errors, and others as they are.
        """
        under_way = next((part for part in self.parts if not part.done()), None)
        if wait and under_way is not None:
            # For one of them: to wait for all takes some time for each, again and again.
            wait_for((under_way,), WAIT_SECONDS)
        if not all(part.done() for part in self.parts):
            return None
        failures = [error for part in self.parts if (error := part.exception()) is not None]
        for error in failures:
            if not isinstance(error, expected):
                raise error
        if failures:
            raise CopyFailed(str(failures[0])) from failures[0]
        return max((part.result() for part in self.parts), default=0.0)


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan whose payloads are being written: when it was begun, its units, and what writes them."""

    began: float
    units: Staging
    parts: list[Future[None]]
    cleared: bool


class DiskCopies:
    """Reads and writes units in threads: one writer, so that writes keep their order, and several readers.

    Both leave the parts of what they do to helpers. The writer does not wait for them: while payloads of one plan are
    written and made durable, it goes on with the next. Plans under way own different units.
    """

    def __init__(self, file: DiskFile, units: Callable[[Kind, int], memoryview]) -> None:
        self.file = file
        # Measured by the first loads.
        self.load_bytes_per_second: float | None = None
        self._units = units
        self._writer = ThreadPoolExecutor(1, "weft-disk-writer")
        self._committer = ThreadPoolExecutor(1, "weft-disk-committer")
        self._readers = ThreadPoolExecutor(READERS, "weft-disk-reader")
        self._read_parts = ThreadPoolExecutor(HELPERS, "weft-disk-read-part")
        self._write_parts = ThreadPoolExecutor(HELPERS, "weft-disk-write-part")

    def copy(self, plan: CopyPlan) -> ThreadedCopies:
        """Begin the copies of a plan."""
        if plan.direction is Direction.SAVE:
            staged = self._writer.submit(self._stage, plan)
            return ThreadedCopies((self._committer.submit(self._commit, staged),))
        runs = self.file.requests([(Kind(unit.kind), unit.lower) for unit in plan.units])
        return ThreadedCopies(tuple(self._readers.submit(self._load, plan, run) for run in runs))

    def copied(self, flight: ThreadedCopies, wait: bool) -> float | None:
        """Return the seconds that the copies took, or None if under way; with `wait`, wait a little for them."""
        return flight.seconds(wait, (OSError, DamagedUnit))

    def close(self) -> None:
        """Finish what is under way, make it durable and unlock the file."""
        self._writer.shutdown()
        self._committer.shutdown()
        self._readers.shutdown()
        self._read_parts.shutdown()
        self._write_parts.shutdown()
        self.file.close()

    def _stage(self, plan: CopyPlan) -> Staged:
        """Begin the writes of a plan. Marks and headers keep their order; payloads of several plans do not."""
        began = perf_counter()
        self.file.doom([(Kind(kind), unit) for kind, unit in plan.doomed])
        self.file.erase(((Kind(kind), unit) for kind, unit in plan.erased), partial(_together, self._write_parts))
        units = [
            (header_of(copy, label), self._units(Kind(copy.kind), copy.upper))
            for copy, label in zip(plan.units, plan.labels, strict=True)
        ]
        staging = self.file.stage(units, [(Kind(kind), unit) for kind, unit in plan.cleared])
        parts = [self._write_parts.submit(task) for task in staging.tasks]
        return Staged(began, staging, parts, bool(plan.cleared))

    def _commit(self, staging: Future[Staged]) -> float:
        staged = staging.result()
        wait_for(staged.parts)
        for part in staged.parts:
            part.result()
        if staged.units.headers or staged.cleared:
            self.file.commit(staged.units)
        return perf_counter() - staged.began

    def _load(self, plan: CopyPlan, run: list[int]) -> float:
        began = perf_counter()
        units = [(Kind(unit.kind), unit, plan.labels[index]) for index in run for unit in [plan.units[index]]]
        self.file.read_run(
            [
                WantedUnit(kind, unit.lower, label.key, self._units(kind, unit.upper), label.position)
                for kind, unit, label in units
            ],
            partial(_together, self._read_parts),
        )
        return perf_counter() - began


def _together(threads: ThreadPoolExecutor, tasks: Sequence[Task]) -> Iterator[None]:
    """Run tasks beside each other; whatever fails, none of them is under way any more when this ends."""
    parts = [threads.submit(task) for task in tasks]
    try:
        for part in parts:
            yield part.result()
    finally:
        wait_for(parts)


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
