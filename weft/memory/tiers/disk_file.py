"""One file of units on disk: written payload first, header last; after a crash, only whole units are found.

No torch, no threads of its own: calls may come from several threads, for different units. A caller with threads to
spare passes `together`, which runs the parts of a call beside each other. A unit's checksum is compared at every read,
so whatever a crash, a bad disk or another program did to the file, a read returns the bytes that were written or raises
`DamagedUnit`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from weft.base.errors import InvalidOption, OptionError
from weft.memory.kinds import Kind
from weft.memory.tiers.disk_format import (
    BLOCK,
    ENTRY,
    ENTRY_TYPE,
    KINDS,
    DiskLayout,
    EntryRows,
    UnitHeader,
    checksum,
    decode,
    read_layout,
)

# Bytes of headers read at once.
REGION_BYTES = 16 << 20
# Units are read and written in pieces of up to this size, whole blocks.
PIECE_BYTES = 4 << 20

# A unit to be written: its header and its payload.
Written = tuple[UnitHeader, memoryview]
# Runs all tasks, and returns their results when the last one has ended, or raises then.
Together = Callable[[Sequence[Callable[[], int]]], list[int]]


def one_by_one(tasks: Sequence[Callable[[], int]]) -> list[int]:
    return [task() for task in tasks]


class DamagedUnit(Exception):
    """The bytes of a unit are not those that its header promises."""


class BlockFile(Protocol):
    """The operations on a file that the disk tier needs. A short read or write raises `OSError`.

    Whole blocks at the offset of a block are read and written directly, so their memory must be aligned too.
    """

    def read(self, offset: int, into: memoryview) -> None: ...

    def write(self, offset: int, data: bytes | memoryview) -> None: ...

    def sync(self) -> None:
        """Return when all writes before are durable."""
        ...

    def close(self) -> None: ...


class FileBlocks:
    """A preallocated file of the operator's own: mode 0600, locked, not reached through a symbolic link."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._file = _open(path)
        try:
            self._claim(path, size_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._direct = self._open_direct()

    def _claim(self, path: Path, size_bytes: int) -> None:
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise InvalidOption("disk", f"{path} must be a file of this user with mode 600; it would hold prompts")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidOption(
                "disk", f"{path} is in use by another process; stop it, or pass another path"
            ) from error
        if found.st_size < size_bytes:
            try:
                os.posix_fallocate(self._file, 0, size_bytes)
            except OSError as error:
                os.ftruncate(self._file, found.st_size)
                raise InvalidOption(
                    "disk_size", f"of {size_bytes} bytes does not fit: {error.strerror}; pass a smaller one"
                ) from error

    def _open_direct(self) -> int | None:
        try:
            return os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except (OSError, AttributeError):
            return None  # the file system, or the system, has no direct input and output

    def _descriptor(self, offset: int, size: int) -> int:
        aligned = offset % BLOCK == 0 and size % BLOCK == 0
        return self._direct if self._direct is not None and aligned else self._file

    def read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptor(offset + done, len(into) - done), [into[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ended early")
            done += count

    def write(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while len(left):
            count = os.pwrite(self._descriptor(offset, len(left)), left, offset)
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            left, offset = left[count:], offset + count

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
        os.close(self._file)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise InvalidOption("disk", f"{path} {why}; pass the path of a file in a folder of your own") from error


def open_file(path: Path, layout: DiskLayout) -> DiskFile:
    """Open or create the file of a model. Raises if it belongs to another model, or to another server."""
    if layout.slabs < len(layout.unit_bytes):
        raise InvalidOption("disk_size", f"is too small: this model needs {layout.slab_bytes * 4} bytes at least")
    blocks = FileBlocks(path, layout.size_bytes)
    try:
        return DiskFile(blocks, layout, str(path))
    except BaseException:
        blocks.close()
        raise


def open_existing(path: Path) -> DiskFile:
    """Open a file of any model, as it is, for inspection."""
    if not path.is_file():
        raise OptionError(f"{path} does not exist; pass the path that --disk named")
    blocks = FileBlocks(path, 0)
    try:
        block = memoryview(mmap.mmap(-1, BLOCK))
        blocks.read(0, block)
        layout = read_layout(block)
        if layout is None:
            raise OptionError(f"{path} is no disk tier of this version; pass the path that --disk named")
        return DiskFile(blocks, layout, str(path))
    except OSError as error:
        blocks.close()
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error
    except BaseException:
        blocks.close()
        raise


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

    def __init__(self, blocks: BlockFile, layout: DiskLayout, name: str = "the file") -> None:
        self.layout = layout
        self.damaged = 0
        self.doomed: list[tuple[Kind, int]] = []
        self._blocks = blocks
        self._staging = threading.local()
        self._check_superblock(name)
        self.rows = self._recover()

    def _check_superblock(self, name: str) -> None:
        block = memoryview(mmap.mmap(-1, BLOCK))
        self._blocks.read(0, block)
        if bytes(block) == bytes(BLOCK):
            # New, or its creation was interrupted. It may be a file of zeros that is longer than ours.
            block[:] = self.layout.encode()
            self._blocks.write(0, block)
            self._blocks.sync()
            return
        theirs = read_layout(block)
        if theirs is None:
            raise InvalidOption("disk", f"{name} is no disk tier of this version; delete it or pass another path")
        if theirs.part != self.layout.part:
            raise InvalidOption(
                "disk",
                f"{name} holds units of {theirs.part}, but this server needs those of {self.layout.part}; pass the "
                "--tensor-parallel that it was made with, delete the files, or pass another path",
            )
        if theirs.fingerprint != self.layout.fingerprint:
            raise InvalidOption("disk", f"{name} belongs to another model; delete it or pass another path")
        if theirs != self.layout:
            raise InvalidOption(
                "disk_size", f"must be the one that {name} was made with, {theirs.size_bytes} bytes; or delete the file"
            )

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

    def write(self, units: Sequence[Written], cleared: Iterable[tuple[Kind, int]] = ()) -> None:
        """Write units: payloads, then, when these are durable, headers. Before, `cleared` units are forgotten."""
        self.commit(self.stage(units, cleared))

    def stage(
        self,
        units: Sequence[Written],
        cleared: Iterable[tuple[Kind, int]] = (),
        together: Together = one_by_one,
    ) -> list[UnitHeader]:
        """Write the payloads of units, and return their headers for `commit`. Before, `cleared` units are forgotten.

        The checksum and the size of a header given here are ignored; those of the payload are written.
        """
        self.clear(cleared)
        for header, _ in units:
            # A header that was here before would promise other bytes.
            self._blocks.write(self.layout.entry_of(header.kind, header.unit), bytes(ENTRY))
        sums = [partial(checksum, payload) for _, payload in units]
        pieces = [
            partial(self._write_piece, header.kind, header.unit, payload, first)
            for header, payload in units
            for first in self._pieces(header.kind)
        ]
        found = together([*sums, *pieces])
        return [
            replace(header, size=self.layout.unit_bytes[header.kind], checksum=each)
            for (header, _), each in zip(units, found, strict=False)
        ]

    def commit(self, headers: Sequence[UnitHeader]) -> None:
        """Make everything that was staged durable, then write these headers. Other units may be staged meanwhile."""
        self._blocks.sync()
        for header in headers:
            self._blocks.write(self.layout.entry_of(header.kind, header.unit), header.encode())

    def read(
        self,
        kind: Kind,
        unit: int,
        key: bytes,
        into: memoryview,
        position: int | None = None,
        together: Together = one_by_one,
    ) -> None:
        """Read a unit; raises `DamagedUnit` if it is not the whole unit of this key, and of this position if given.

        The window pages of a resume point have one key. After a crash, files of several ranks may differ in their
        order. What is in `into` after an error is no unit.
        """
        entry = memoryview(bytearray(ENTRY))
        place = self.layout.entry_of(kind, unit)
        try:
            self._blocks.read(place, entry)
            together([partial(self._read_piece, kind, unit, into, first) for first in self._pieces(kind)])
        except OSError as error:
            self.damaged += 1
            raise DamagedUnit(f"cannot read a {kind}: {error}") from error
        header = self.layout.header_at(entry, place)
        whole = header is not None and header.checksum == checksum(into)
        if header is None or not whole or (header.kind, header.key) != (kind, key):
            self.damaged += 1
            raise DamagedUnit(f"a {kind} on disk is not what its header says")
        if position is not None and header.position != position:
            self.damaged += 1
            raise DamagedUnit(f"a {kind} on disk belongs at token {header.position}, not {position}")

    def is_whole(self, header: UnitHeader) -> bool:
        """Return whether a unit can be read."""
        try:
            self.read(header.kind, header.unit, header.key, memoryview(bytearray(header.size)))
        except DamagedUnit:
            return False
        return True

    def clear(self, units: Iterable[tuple[Kind, int]]) -> None:
        """Forget units. Their bytes stay until others overwrite them."""
        for kind, unit in units:
            self._blocks.write(self.layout.entry_of(kind, unit), bytes(ENTRY))

    def doom(self, units: Sequence[tuple[Kind, int]]) -> None:
        """Mark units that are to be erased: from here on no process uses them, and one that opens the file knows."""
        for kind, unit in units:
            self._blocks.write(self.layout.entry_of(kind, unit), self.layout.doomed_entry(kind, unit))
        if units:
            self._blocks.sync()

    def erase(self, units: Iterable[tuple[Kind, int]], together: Together = one_by_one) -> None:
        """Overwrite units with zeros, and then forget them. Mark them first with `doom`, all units of a drop."""
        chosen = list(units)
        if not chosen:
            return
        nothing = memoryview(b"")
        together(
            [partial(self._write_piece, *unit, nothing, first) for unit in chosen for first in self._pieces(unit[0])]
        )
        self._blocks.sync()
        self.clear(chosen)
        self._blocks.sync()

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

    def close(self) -> None:
        """Make everything durable and unlock the file."""
        self._blocks.sync()
        self._blocks.close()

    # pieces ---------------------------------------------------------------------------------------------------------

    def _pieces(self, kind: Kind) -> range:
        """Return where the pieces of a unit begin."""
        return range(0, self.layout.padded[kind], PIECE_BYTES)

    def _write_piece(self, kind: Kind, unit: int, payload: memoryview, first: int) -> int:
        """Write a piece of a unit. Zeros follow the payload, up to the end of its last block."""
        staged = self._aligned(kind, first)
        part = payload[first : first + len(staged)]
        array = np.frombuffer(staged, np.uint8)
        # NumPy lets other threads run while it copies.
        array[: len(part)] = np.frombuffer(part, np.uint8)
        array[len(part) :] = 0
        self._blocks.write(self.layout.offset_of(kind, unit) + first, staged)
        return len(staged)

    def _read_piece(self, kind: Kind, unit: int, into: memoryview, first: int) -> int:
        staged = self._aligned(kind, first)
        self._blocks.read(self.layout.offset_of(kind, unit) + first, staged)
        part = np.frombuffer(into[first : first + len(staged)], np.uint8)
        part[:] = np.frombuffer(staged, np.uint8)[: len(part)]
        return len(staged)

    def _aligned(self, kind: Kind, first: int) -> memoryview:
        """Return this thread's memory for a piece, aligned as direct input and output need it."""
        known: memoryview | None = getattr(self._staging, "buffer", None)
        if known is None:
            size = min(PIECE_BYTES, max(self.layout.padded.values()))
            known = self._staging.buffer = memoryview(mmap.mmap(-1, size))
        return known[: self.layout.padded[kind] - first]
