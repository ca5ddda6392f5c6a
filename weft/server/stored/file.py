"""A file of records that are overwritten when they are removed. Knows no responses.

    block 0            magic, key
    others             records, each from the start of a block: magic, length, HMAC of the payload, payload

The key is random and never leaves the file. So a client's text that lies at the start of a block, after a crash in the
middle of a write, cannot be taken for a record: whatever is none is overwritten when the file is opened.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from weft.base.errors import OptionError
from weft.base.file_locks import lock
from weft.server.stored.gaps import Gaps

BLOCK = 4096
MAGIC = b"weft responses 1"
RECORD = b"weft record 1\n\0\0"
KEY_BYTES = 32
_HEAD = len(RECORD) + 8 + 32
# Blocks that are overwritten at once.
_SOME = 256


class RecordFile:
    """Opened exclusively, with mode 0600. Records are named by their first block."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._most_blocks = max(2, most_bytes // BLOCK)
        self._blocks_of: dict[int, int] = {}
        self._gaps = Gaps()
        self._free(1, self._most_blocks)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._file = os.open(path, flags, 0o600)
            self._key = self._claim(path)
        except OSError as error:
            raise OptionError(f"cannot open {path}: {error.strerror}; pass another --disk or free the file") from None

    def _claim(self, path: Path) -> bytes:
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            os.close(self._file)
            raise OptionError(f"{path} must be a regular file of the server's own user")
        os.fchmod(self._file, 0o600)
        lock(self._file)
        if not state.st_size:
            key = secrets.token_bytes(KEY_BYTES)
            os.pwrite(self._file, (MAGIC + key).ljust(BLOCK, b"\0"), 0)
            os.fsync(self._file)
            return key
        found = os.pread(self._file, len(MAGIC) + KEY_BYTES, 0)
        if not found.startswith(MAGIC) or len(found) < len(MAGIC) + KEY_BYTES:
            os.close(self._file)
            raise OptionError(f"{path} is no file of responses; move it away")
        return found[len(MAGIC) :]

    @property
    def _end(self) -> int:
        return -(-os.fstat(self._file).st_size // BLOCK)

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield all records, and overwrite everything that is none. Call it once, before anything is added."""
        place, end, free = 1, self._end, 1
        self._gaps = Gaps()
        while place < end:
            payload = self._read(place, end)
            if payload is None:
                if any(os.pread(self._file, BLOCK, place * BLOCK)):
                    self._zero(place, 1)
                place += 1
                continue
            self._blocks_of[place] = _blocks(payload)
            self._free(free, place)
            yield place, payload
            place = free = place + _blocks(payload)
        self._free(free, self._most_blocks)

    def _free(self, start: int, end: int) -> None:
        """Make blocks free, as far as the file may grow: it may have been larger before."""
        self._gaps.give(start, min(end, self._most_blocks) - start)

    def _read(self, place: int, end: int) -> bytes | None:
        head = os.pread(self._file, _HEAD, place * BLOCK)
        if not head.startswith(RECORD) or len(head) < _HEAD:
            return None
        length = int.from_bytes(head[len(RECORD) : len(RECORD) + 8], "little")
        if length > (end - place) * BLOCK - _HEAD:
            return None
        payload = os.pread(self._file, length, place * BLOCK + _HEAD)
        same = hmac.compare_digest(self._digest(payload), head[-32:])
        return payload if same and len(payload) == length else None

    def _digest(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, sha256)

    def add(self, payload: bytes) -> int | None:
        """Write a record to the smallest gap that has room, and return its place; None: the file is full."""
        blocks = _blocks(payload)
        place = self._gaps.take(blocks)
        if place is None:
            return None
        head = RECORD + len(payload).to_bytes(8, "little") + self._digest(payload)
        try:
            _write(self._file, (head + payload).ljust(blocks * BLOCK, b"\0"), place * BLOCK)
            os.fdatasync(self._file)
        except OSError:
            self._free(place, place + blocks)
            raise
        self._blocks_of[place] = blocks
        return place

    def erase(self, place: int) -> None:
        """Overwrite a record, and return when that is on the disk."""
        self._zero(place, self._blocks_of[place])
        os.fdatasync(self._file)
        self._free(place, place + self._blocks_of.pop(place))

    def _zero(self, place: int, blocks: int) -> None:
        for first in range(place, place + blocks, _SOME):
            _write(self._file, bytes(BLOCK * min(_SOME, place + blocks - first)), first * BLOCK)

    def close(self) -> None:
        os.close(self._file)


def _blocks(payload: bytes) -> int:
    return -(-(_HEAD + len(payload)) // BLOCK)


def _write(file: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
