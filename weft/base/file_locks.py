"""Locks on files, which keep other processes out while a file is open."""

from __future__ import annotations

import errno

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


def lock(file: int, wait: bool = False, of_process: bool = False) -> None:
    """Lock an open file. Raise BlockingIOError if another process has locked it, OSError on systems without locks.

    `of_process`: processes that this one starts do not hold it on.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no locks on files")
    (fcntl.lockf if of_process else fcntl.flock)(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
