"""One file of units on disk: written payload first, header last; after a crash, only whole units are found.

No torch, no threads of its own: calls may come from several threads, for different units. A caller with threads to
spare passes `together`, which runs the parts of a call beside each other. A unit's checksum is compared at every read,
so whatever a crash, a bad disk or another program did to the file, a read returns the bytes that were written or raises
`DamagedUnit`. Payloads pass through a few pieces of memory that are used again and again (`reused_memory.py`).
Checksums are computed from the units' own memory, for a read after its bytes were copied there, so they cover the
pieces too.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidOption, OptionError
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.block_file import BlockFile, FileBlocks
from weft.memory.tiers.disk.format import (
    BLOCK,
    ENTRY,
    ENTRY_TYPE,
    KINDS,
    DiskLayout,
    EntryRows,
    UnitHeader,
    checksum,
    checksum_of_parts,
    decode,
    is_earlier,
    read_layout,
)
from weft.memory.tiers.disk.reused_memory import ReusedMemory

log = logging.getLogger("weft")

# Bytes of headers read at once.
REGION_BYTES = 16 << 20
# Larger units are read and written in pieces of this size; smaller ones that lie side by side, in runs of up to it.
PIECE_BYTES = 4 << 20
# Requests of each direction under way at once; reads do not wait for writes. Each has a piece of memory.
REQUESTS = 8
# Headers of units side by side are written at once, with the zeros between them: up to this many bytes, and only if the
# next header begins this near. Those of large units are far apart.
HEADERS_BYTES = 1 << 20
HEADER_GAP = 4 << 10

Place = tuple[Kind, int]
# A unit to be written: its header and its payload.
Written = tuple[UnitHeader, memoryview]
# Runs tasks, and yields once for each in their order. None of them is under way when it has ended, or raised.
Task = Callable[[], None]
Together = Callable[[Sequence[Task]], Iterator[None]]


def one_by_one(tasks: Sequence[Task]) -> Iterator[None]:
    return (task() for task in tasks)


@dataclass(frozen=True, slots=True)
class WantedUnit:
    """A unit to be read, and where to. `position` is compared if it is given."""

    kind: Kind
    unit: int
    key: Key
    into: memoryview
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Staging:
    """Units whose payloads are written by `tasks`, in any order; then their headers are complete.

    `failed_syncs` is the count of the file before the first of these writes.
    """

    headers: list[UnitHeader]
    tasks: list[Task]
    failed_syncs: int


class DamagedUnit(Exception):
    """The bytes of a unit are not those that its header promises."""


def difference(unit: WantedUnit, header: UnitHeader | None, found: int) -> str | None:
    """Return why what lies in the place of a unit is not the unit, or None if it is; `found` is its bytes' checksum."""
    if header is None:
        return "has no header"
    if header.checksum != found:
        return "has other bytes than its header says"
    if (header.kind, header.key) != (unit.kind, unit.key):
        return "is another unit"
    if unit.position is not None and header.position != unit.position:
        return f"belongs at token {header.position}, not {unit.position}"
    return None


def open_file(path: Path, layout: DiskLayout) -> DiskFile:
    """Open or create the file of a model. Raises if it belongs to another model, or to another server.

    A file of the same model whose units were computed by other code is emptied.
    """
    if layout.slabs < len(layout.unit_bytes):
        raise InvalidOption("disk_size", f"is too small: this model needs {layout.slab_bytes * 4} bytes at least")
    blocks = FileBlocks(path)
    try:
        return DiskFile(blocks, layout, str(path))
    except BaseException:
        blocks.close()
        raise


def open_existing(path: Path) -> DiskFile:
    """Open a file of any model, as it is, for inspection."""
    if not path.is_file():
        raise OptionError(f"{path} does not exist; pass the path that --disk named")
    blocks = FileBlocks(path)
    try:
        block = _read_superblock(blocks)
        layout = None if block is None else read_layout(block)
        if layout is None:
            raise OptionError(f"{path} is no disk tier of this version; pass the path that --disk named")
        return DiskFile(blocks, layout, str(path), as_it_is=True)
    except OSError as error:
        blocks.close()
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error
    except BaseException:
        blocks.close()
        raise


def _read_superblock(blocks: BlockFile) -> memoryview | None:
    """Return the first block of a file, or None if it has none."""
    if blocks.size_bytes < BLOCK:
        return None
    block = memoryview(mmap.mmap(-1, BLOCK))
    blocks.read(0, block)
    return block


def rows_of_first(path: Path, layout: DiskLayout) -> EntryRows:
    """Return the entries in the first rank's file, which its own process has locked, for another rank's layout."""
    parts = [np.zeros(0, ENTRY_TYPE)]
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return parts[0]
    try:
        for first in range(BLOCK, layout.payload_offset, REGION_BYTES):
            region = os.pread(file, min(REGION_BYTES, layout.payload_offset - first), first)
            parts.append(layout.rows(memoryview(region)[: len(region) // ENTRY * ENTRY], first)[0])
    finally:
        os.close(file)
    return np.concatenate(parts)


class DiskFile:
    """`rows` are the entries of all units at the start; `damaged` counts headers and units that were dropped.

    `doomed` are units that an earlier process was about to erase.
    """

    def __init__(
        self, blocks: BlockFile, layout: DiskLayout, name: str = "the file", *, as_it_is: bool = False
    ) -> None:
        """Begin an empty file, or check whose it is; then give it its size, unless it is opened `as_it_is`."""
        self.layout = layout
        self.damaged = 0
        self.doomed: list[Place] = []
        self._blocks = blocks
        self._for_reads = ReusedMemory(REQUESTS, PIECE_BYTES)
        self._for_writes = ReusedMemory(REQUESTS, PIECE_BYTES)
        if not blocks.size_bytes:
            self._begin_file()
        self._check_superblock(name)
        if not as_it_is:
            # Not before: a file that is not ours must not change. A crash may have come before it had its size.
            blocks.grow(layout.size_bytes)
        self.rows = self._recover()

    def _begin_file(self) -> None:
        """Write the superblock of a new file, before anything else: from then on the file is known as ours."""
        block = memoryview(mmap.mmap(-1, BLOCK))
        block[:] = self.layout.encode()
        self._blocks.write(0, block)
        self.sync()

    def _check_superblock(self, name: str) -> None:
        block = _read_superblock(self._blocks)
        theirs = None if block is None else read_layout(block)
        if theirs is None and block is not None and is_earlier(block, self.layout):
            self._start_over(name, "it was written by an earlier version of Weft")
            return
        if theirs is None:
            raise InvalidOption("disk", f"{name} is no disk tier of this version; delete it or pass another path")
        if theirs.part != self.layout.part:
            raise InvalidOption(
                "disk",
                f"{name} holds units of {theirs.part}, but this server needs those of {self.layout.part}; pass the "
                "--tensor-parallel that it was made with, delete the files, or pass another path",
            )
        if theirs.identity.is_outdated_by(self.layout.identity):
            self._start_over(name, theirs.identity.difference(self.layout.identity))
            return
        if theirs.identity != self.layout.identity:
            why = theirs.identity.difference(self.layout.identity)
            raise InvalidOption("disk", f"{name} belongs to another model: {why}; delete it or pass another path")
        if theirs != self.layout:
            raise InvalidOption(
                "disk_size", f"must be the one that {name} was made with, {theirs.size_bytes} bytes; or delete the file"
            )

    def _start_over(self, name: str, why: str) -> None:
        """Empty a file of this model whose units other code has computed: none of them may be read."""
        log.warning("disk: %s is emptied, because its states cannot be used: %s", name, why)
        self._blocks.empty()
        self._begin_file()

    def _recover(self) -> EntryRows:
        """Read all headers, in one pass."""
        parts: list[EntryRows] = []
        self.doomed.clear()
        first, end = BLOCK, self.layout.payload_offset
        while first < end:
            region = memoryview(mmap.mmap(-1, min(REGION_BYTES, end - first)))
            self._blocks.read(first, region)
            rows, doomed, damaged = self.layout.rows(region[: len(region) // ENTRY * ENTRY], first)
            parts.append(rows)
            self.doomed += [(KINDS[int(each["kind"])], int(each["unit"])) for each in doomed]
            self.damaged += damaged
            first += len(region)
        return np.concatenate(parts)

    def reread(self) -> None:
        """Read the headers again, after units were written or erased without a tier."""
        self.damaged = 0
        self.rows = self._recover()
        self.__dict__.pop("found", None)

    def header(self, row: int) -> UnitHeader | None:
        """Return a header that was found at the start, or None if it is damaged."""
        header = decode(self.rows[row].tobytes())
        self.damaged += header is None
        return header

    @cached_property
    def found(self) -> list[UnitHeader]:
        """The headers of all units at the start, for tools; a tier enters them one by one."""
        headers = (self.header(row) for row in range(len(self.rows)))
        return [header for header in headers if header is not None]

    # units ----------------------------------------------------------------------------------------------------------

    def requests(self, places: Sequence[Place]) -> Iterator[list[int]]:
        """Yield groups of units that are read or written at once, as indices of `places`: side by side, or one unit."""
        return self._runs(places, {kind: PIECE_BYTES // size for kind, size in self.layout.padded.items()})

    def _runs(self, places: Sequence[Place], most: Mapping[Kind, int]) -> Iterator[list[int]]:
        """Yield runs of units side by side, each as indices of `places`, of `most` units of their kind or of one."""
        run: list[int] = []
        for index in sorted(range(len(places)), key=places.__getitem__):
            kind, unit = places[index]
            beside = bool(run) and places[run[-1]] == (kind, unit - 1)
            if run and not (beside and len(run) < most[kind]):
                yield run
                run = []
            run.append(index)
        if run:
            yield run

    def write(self, units: Sequence[Written], cleared: Iterable[Place] = ()) -> None:
        """Write units: payloads, then, when these are durable, headers. Before, `cleared` units are forgotten."""
        staging = self.stage(units, cleared)
        _finish(one_by_one(staging.tasks))
        self.commit(staging)

    def stage(self, units: Sequence[Written], cleared: Iterable[Place] = ()) -> Staging:
        """Begin to write units: when the tasks have run, `commit` them. Before, `cleared` units are forgotten.

        The checksum and the size of a header given here are ignored; those of the payload are written.
        """
        places = [(header.kind, header.unit) for header, _ in units]
        found = Staging([header for header, _ in units], [], self._blocks.failed_syncs)
        # A header that was in one of the places before would promise other bytes.
        self.clear([*cleared, *places])
        for run in self.requests(places):
            found.tasks.append(partial(self._sum_up, found.headers, run, units))
            found.tasks.extend(self._writes(places[run[0]], [units[index][1] for index in run]))
        return found

    def _sum_up(self, headers: list[UnitHeader], run: list[int], units: Sequence[Written]) -> None:
        for index in run:
            payload = units[index][1]
            headers[index] = replace(headers[index], size=len(payload), checksum=checksum(payload))

    def _writes(self, first: Place, payloads: Sequence[memoryview]) -> Iterator[Task]:
        """Yield what writes the payloads of units that lie side by side."""
        place, padded = self.layout.offset_of(*first), self.layout.padded[first[0]]
        if padded <= PIECE_BYTES:
            yield partial(self._write, place, payloads, padded)
            return
        for start in range(0, padded, PIECE_BYTES):
            size = min(PIECE_BYTES, padded - start)
            yield partial(self._write, place + start, [payloads[0][start : start + size]], size)

    def commit(self, staging: Staging) -> None:
        """Make what was staged durable, then write its headers. Other units may be staged meanwhile."""
        self.make_durable(staging.failed_syncs)
        self._write_entries([((header.kind, header.unit), header.encode()) for header in staging.headers])

    def read(
        self,
        kind: Kind,
        unit: int,
        key: Key,
        into: memoryview,
        position: int | None = None,
        together: Together = one_by_one,
    ) -> None:
        """Read a unit; raises `DamagedUnit` if it is not the whole unit of this key, and of this position if given.

        The window pages of a resume point have one key. After a crash, files of several ranks may differ in their
        order. What is in `into` after an error is no unit.
        """
        self.read_run([WantedUnit(kind, unit, key, into, position)], together)

    def read_run(self, units: Sequence[WantedUnit], together: Together = one_by_one) -> None:
        """Read units that lie side by side, as `read` does."""
        kind, layout = units[0].kind, self.layout
        first, last = (layout.entry_of(kind, unit) for unit in (units[0].unit, units[-1].unit))
        entries = memoryview(bytearray(last + ENTRY - first))
        try:
            self._blocks.read(first, entries)
            sums = self._read_payloads(layout.offset_of(kind, units[0].unit), units, together)
        except OSError as error:
            self.damaged += 1
            raise DamagedUnit(f"cannot read a {kind}: {error}") from error
        for unit, found in zip(units, sums, strict=True):
            place = layout.entry_of(kind, unit.unit)
            reason = difference(unit, layout.header_at(entries[place - first :][:ENTRY], place), found)
            if reason is not None:
                self.damaged += 1
                raise DamagedUnit(f"a {kind} on disk {reason}")

    def _read_payloads(self, place: int, units: Sequence[WantedUnit], together: Together) -> list[int]:
        """Read the payloads of units, and return their checksums."""
        padded, into = self.layout.padded[units[0].kind], units[0].into
        if padded <= PIECE_BYTES:
            self._read(place, [unit.into for unit in units], padded)
            return [checksum(unit.into) for unit in units]
        pieces = {start: min(PIECE_BYTES, padded - start) for start in range(0, padded, PIECE_BYTES)}
        parts = [into[start : start + size] for start, size in pieces.items()]
        reads = [
            partial(self._read, place + start, [part], size)
            for (start, size), part in zip(pieces.items(), parts, strict=True)
        ]
        # Each part is summed up while the next ones are read.
        return [checksum_of_parts(part for part, _ in zip(parts, together(reads), strict=True))]

    def is_whole(self, header: UnitHeader) -> bool:
        """Return whether a unit can be read."""
        try:
            self.read(header.kind, header.unit, header.key, memoryview(bytearray(header.size)))
        except DamagedUnit:
            return False
        return True

    def clear(self, units: Iterable[Place]) -> None:
        """Forget units. Their bytes stay until others overwrite them."""
        self._write_entries([(unit, bytes(ENTRY)) for unit in units])

    def doom(self, units: Sequence[Place]) -> None:
        """Mark units that are to be erased: from here on no process uses them, and one that opens the file knows."""
        if units:
            failed_syncs = self._blocks.failed_syncs
            self._write_entries([(unit, self.layout.doomed_entry(*unit)) for unit in units])
            self.make_durable(failed_syncs)

    def erase(self, units: Iterable[Place], together: Together = one_by_one) -> None:
        """Overwrite units with zeros, and then forget them. Mark them first with `doom`, all units of a drop."""
        chosen, nothing = list(units), memoryview(b"")
        if not chosen:
            return
        failed_syncs = self._blocks.failed_syncs
        runs = [[chosen[index] for index in run] for run in self.requests(chosen)]
        _finish(together([task for run in runs for task in self._writes(run[0], [nothing] * len(run))]))
        self.make_durable(failed_syncs)
        self.clear(chosen)
        self.make_durable(failed_syncs)

    def erase_all_but(self, known: EntryRows) -> None:
        """Erase doomed units, and those that the first rank does not have after a crash: no drop would find them."""
        # Entries lie in the order of their places; a place has one unit at most.
        own, theirs = (self.layout.places(rows) for rows in (self.rows, known))
        there = np.searchsorted(theirs, own)
        both = np.flatnonzero(there < len(theirs))
        both = both[theirs[there[both]] == own[both]]
        for field in ("kind", "key", "position"):
            both = both[self.rows[field][both] == known[field][there[both]]]
        lost = [(KINDS[int(each["kind"])], int(each["unit"])) for each in np.delete(self.rows, both)]
        self.doom(lost)
        self.erase([*self.doomed, *lost])

    def sync(self) -> None:
        self._blocks.sync()

    def make_durable(self, failed_syncs: int) -> None:
        """Return when writes are durable; `failed_syncs` is the count before the first of them.

        If a sync has failed since then, perhaps in another thread, it has lost them, and a later one does not know.
        """
        self._blocks.sync()
        if self._blocks.failed_syncs != failed_syncs:
            raise OSError(errno.EIO, "a sync has failed meanwhile")

    def close(self) -> None:
        """Make everything durable and unlock the file."""
        try:
            self._blocks.sync()
        finally:
            self._blocks.close()

    # bytes ----------------------------------------------------------------------------------------------------------

    def _write_entries(self, entries: Sequence[tuple[Place, bytes]]) -> None:
        """Write headers of units, those side by side at once. No unit begins between these, so there is no header."""
        smallest = min(self.layout.padded.values())
        apart = {kind: -(-size // smallest) * ENTRY for kind, size in self.layout.padded.items()}
        most = {kind: HEADERS_BYTES // each if each <= HEADER_GAP else 1 for kind, each in apart.items()}
        for run in self._runs([place for place, _ in entries], most):
            places = [self.layout.entry_of(*entries[index][0]) for index in run]
            together = bytearray(places[-1] + ENTRY - places[0])
            for index, place in zip(run, places, strict=True):
                together[place - places[0] : place - places[0] + ENTRY] = entries[index][1]
            self._blocks.write(places[0], memoryview(together))

    def _write(self, place: int, parts: Sequence[memoryview], stride: int) -> None:
        """Write parts one after the other. Zeros follow those that are shorter than `stride`."""
        with self._for_writes.piece() as piece:
            staged = piece[: len(parts) * stride]
            for row, part in zip(_rows(staged, stride), parts, strict=True):
                # NumPy lets other threads run while it copies.
                row[: len(part)] = np.frombuffer(part, np.uint8)
                row[len(part) :] = 0
            self._blocks.write(place, staged)

    def _read(self, place: int, parts: Sequence[memoryview], stride: int) -> None:
        """Read parts that begin `stride` bytes after each other."""
        with self._for_reads.piece() as piece:
            staged = piece[: len(parts) * stride]
            self._blocks.read(place, staged)
            for row, part in zip(_rows(staged, stride), parts, strict=True):
                np.frombuffer(part, np.uint8)[:] = row[: len(part)]


def _rows(memory: memoryview, stride: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8).reshape(-1, stride)


def _finish(tasks: Iterator[None]) -> None:
    for _ in tasks:
        pass
