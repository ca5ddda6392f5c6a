"""A few pieces of memory through which all bytes from and to a file pass.

On a virtual machine a disk is slow to read into memory that it has not written to before, or not for a while: the host
has to map each page first. Pieces that are used again and again stay mapped, and copying from them takes less time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import LifoQueue


class ReusedMemory:
    """Pieces that begin at multiples of a page. The system provides a piece when it is first used."""

    def __init__(self, pieces: int, piece_bytes: int) -> None:
        memory = mmap.mmap(-1, pieces * piece_bytes)
        with suppress(OSError, AttributeError):
            # Large pages, if the system has them: a request for scattered ones would be cut into several.
            memory.madvise(mmap.MADV_HUGEPAGE)
        # The piece that was used last is taken first.
        self._free: LifoQueue[memoryview] = LifoQueue()
        for first in range(0, len(memory), piece_bytes):
            self._free.put(memoryview(memory)[first : first + piece_bytes])

    @contextmanager
    def piece(self) -> Iterator[memoryview]:
        """Wait for a free piece. It belongs to the caller, with anything in it, until the context ends."""
        taken = self._free.get()
        try:
            yield taken
        finally:
            self._free.put(taken)
