"""A file in memory that loses power: writes that were not synced are dropped, torn and reordered by sector."""

from __future__ import annotations

import errno
from random import Random
from threading import RLock

from weft.base.tenants import tenant_digest
from weft.memory.captures import Origin
from weft.memory.identity import Identity
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.format import DiskLayout, UnitHeader

SECTOR = 512
UNIT_BYTES = {Kind.PAGE: 5000, Kind.WINDOW: 3000, Kind.STATE: 20_000}
IDENTITY = Identity(b"c" * 16, b"w" * 16, b"l" * 16, "Tiny 1, plain 1")
LAYOUT = DiskLayout.of(IDENTITY, UNIT_BYTES, 1 << 20)


class FlakyBlocks:
    """`fail` is called before every write, and may raise. With `tear`, a write may stop in the middle and raise.

    With `forget`, syncs fail: what was not durable before may be lost, and as on Linux, no later sync tries it again.
    The error is raised, or another thread has had it just before. The file is empty at first, and `size` is the most
    that it can have. Bytes beyond what is durable are lost together with the size, as in file systems with a journal.
    """

    def __init__(self, size: int) -> None:
        self.size_bytes = self.durable_bytes = 0
        self.durable = bytearray(size)
        self.now = bytearray(size)
        self.pending: list[tuple[int, bytes]] = []
        self.fail = lambda offset, size: None
        self.tear: Random | None = None
        self.forget: Random | None = None
        self.failed_syncs = 0
        self._lock = RLock()

    def read(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > self.size_bytes:
            raise OSError(errno.EIO, "the file ended early")
        into[:] = self.now[offset : offset + len(into)]

    def grow(self, size_bytes: int) -> None:
        self.size_bytes = max(self.size_bytes, size_bytes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.fail(offset, len(data))
        with self._lock:
            self._write(offset, data)
            self.grow(offset + len(data))

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        torn = self.tear is not None and self.tear.random() < 0.3
        data = bytes(data[: self.tear.randrange(len(data))] if torn and self.tear is not None else data)
        self.now[offset : offset + len(data)] = data
        for first in range(0, len(data), SECTOR):
            self.pending.append((offset + first, data[first : first + SECTOR]))
        if torn:
            raise OSError(errno.ENOSPC, "no room for the rest")

    def sync(self) -> None:
        with self._lock:
            self._sync()

    def _sync(self) -> None:
        if self.forget is not None and self.forget.random() < 0.2:
            self.fail_sync(self.forget)
            if self.forget.random() < 0.5:
                raise OSError(errno.EIO, "a bad sector")
        for offset, data in self.pending:
            self.durable[offset : offset + len(data)] = data
        self.pending.clear()
        self.durable_bytes = self.size_bytes

    def empty(self) -> None:
        for content in (self.now, self.durable):
            content[:] = bytes(len(content))
        self.pending.clear()
        self.size_bytes = self.durable_bytes = 0

    def close(self) -> None:
        pass

    def fail_sync(self, random: Random) -> None:
        self.failed_syncs += 1
        self._persist_some(random)

    def lose_power(self, random: Random) -> None:
        """Keep any of the unsynced sectors, in any order."""
        self._persist_some(random)
        self.size_bytes = self.durable_bytes
        self.durable[self.size_bytes :] = bytes(len(self.durable) - self.size_bytes)
        self.now[:] = self.durable

    def _persist_some(self, random: Random) -> None:
        kept = [each for each in self.pending if random.random() < random.choice([0.1, 0.5, 0.9])]
        random.shuffle(kept)
        for offset, data in kept:
            self.durable[offset : offset + len(data)] = data
        self.pending.clear()


def content(key: Key, kind: Kind) -> bytes:
    """The bytes that belong to a key."""
    return Random(key + kind.value.encode()).randbytes(UNIT_BYTES[kind])


def header(kind: Kind, unit: int, key: Key, parent: Key | None = None) -> UnitHeader:
    return UnitHeader(kind, unit, 64, key, parent, tenant_digest(b"one"), Origin.PROMPT_END, 0, 0)
