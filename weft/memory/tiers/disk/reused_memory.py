"""A few pieces of memory through which the bytes from and to a file pass.

On virtual machines, the first direct read into memory is up to three times slower than later ones, although the memory
was written to before. Pieces that are used again and again do not have that price, and copying from them is faster than
a disk.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from queue import LifoQueue


class ReusedMemory:
    """Pieces that begin at multiples of a page. The system provides a piece when it is first used."""

    def __init__(self, pieces: int, piece_bytes: int) -> None:
        memory = mmap.mmap(-1, pieces * piece_bytes)
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
