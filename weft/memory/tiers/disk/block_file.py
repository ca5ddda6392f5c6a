"""A file of blocks: read and written directly where the system can, private to its user, and locked."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Protocol

import numpy as np

from weft.base.errors import InvalidOption
from weft.base.file_locks import lock
from weft.memory.tiers.disk.format import BLOCK


class BlockFile(Protocol):
    """The operations on a file that the disk tier needs. A short read or write raises `OSError`.

    `failed_syncs` counts those that raised. What was written before one of them may be lost, and no later sync says so.
    Whole blocks at the offset of a block are read and written directly, if their memory is aligned too.
    """

    @property
    def failed_syncs(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def grow(self, size_bytes: int) -> None:
        """Give a shorter file this size, with zeros at its end. A longer one stays as it is."""
        ...

    def empty(self) -> None:
        """Drop all bytes, as if the file had been deleted and made again."""
        ...

    def read(self, offset: int, into: memoryview) -> None: ...

    def write(self, offset: int, data: bytes | memoryview) -> None: ...

    def sync(self) -> None:
        """Return when all writes since the last sync that failed are durable."""
        ...

    def close(self) -> None: ...


class FileBlocks:
    """A file of the operator's own: mode 0600, locked, not reached through a symbolic link.

    Opening creates the file if there is none, and changes nothing of one that exists.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(path)
        try:
            _claim(self._file, path)
        except BaseException:
            os.close(self._file)
            raise
        self._first_bytes = self.size_bytes
        self._direct = self._open_direct()
        self._syncing = threading.Lock()
        self.failed_syncs = 0

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._file).st_size

    def grow(self, size_bytes: int) -> None:
        if self.size_bytes >= size_bytes:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size_bytes)
            else:
                # A full disk is found when it is written to.
                os.ftruncate(self._file, size_bytes)
        except OSError as error:
            # As it was opened: a new file is empty again, so that it may get another size.
            os.ftruncate(self._file, self._first_bytes)
            raise InvalidOption(
                "disk_size", f"of {size_bytes} bytes does not fit: {error.strerror}; pass a smaller one"
            ) from error

    def empty(self) -> None:
        os.ftruncate(self._file, 0)
        self._first_bytes = 0

    def _open_direct(self) -> int | None:
        try:
            return os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except (OSError, AttributeError):
            return None  # the file system, or the system, has no direct input and output

    def _descriptor(self, offset: int, memory: memoryview) -> int:
        if self._direct is None or offset % BLOCK or not _is_aligned(memory):
            return self._file
        return self._direct

    def read(self, offset: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._descriptor(offset, into), [into], offset)
            if count == 0:
                raise OSError(errno.EIO, "the file ended early")
            into, offset = into[count:], offset + count

    def write(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            count = os.pwrite(self._descriptor(offset, left), left, offset)
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            left, offset = left[count:], offset + count

    def sync(self) -> None:
        # One at a time: the system reports a loss once, so it must be counted before another thread asks.
        with self._syncing:
            try:
                os.fdatasync(self._file)
            except OSError:
                self.failed_syncs += 1
                raise

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
        os.close(self._file)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Looked at first: to open a device may already do something.
        _check_owned(os.lstat(path), path)
    except FileNotFoundError:
        flags |= os.O_CREAT
    except OSError:
        pass  # opening it fails as well, and says why
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise InvalidOption(
            "disk", f"{path} cannot be opened: {error.strerror}; pass the path of a file in a folder of your own"
        ) from error


def _check_owned(found: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise InvalidOption("disk", f"{path} is a symbolic link; pass the path of a file in a folder of your own")
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidOption("disk", f"{path} must be a file of this user with mode 600; it would hold prompts")


def _claim(file: int, path: Path) -> None:
    """Check that the opened file is the operator's own, and lock it."""
    _check_owned(os.fstat(file), path)
    try:
        lock(file)
    except BlockingIOError as error:
        raise InvalidOption("disk", f"{path} is in use by another process; stop it, or pass another path") from error
    except OSError as error:
        raise InvalidOption("disk", f"{path} cannot be locked: {error.strerror}; leave the option out") from error


def _is_aligned(memory: memoryview) -> bool:
    """Return whether memory consists of whole blocks, and begins at a multiple of one."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % BLOCK == 0 and len(memory) % BLOCK == 0
