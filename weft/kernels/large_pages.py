"""Memory in pages of two megabytes, for what every step reads from end to end.

With pages of 4 KiB a processor waits for addresses as well as for bytes. Linux takes large ones by itself only where a
program asks for them, or does so for everything. Asked for before memory is touched, they cost nothing, and it takes
less time to fill them.
"""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

LARGE, LINE = 2 << 20, 64
# Address space that matrices share, so that few large pages belong to one in part.
SHARED_BYTES = 64 << 20
# What is smaller is left to the allocator.
LEAST_BYTES = 64 << 10


class WeightRoom:
    """Memory in large pages for one tensor after another. A mapping ends with the last tensor in it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: mmap.mmap | None = None
        self.next = self.end = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Return memory that was never touched, and where in it."""
        with self.lock:
            if self.memory is None or self.next + size > self.end:
                length = -(-max(size, SHARED_BYTES) // LARGE) * LARGE
                self.memory, self.next = mapped(length + LARGE)
                self.end = self.next + length
            place = self.next
            self.next += -(-size // LINE) * LINE
            return self.memory, place


def mapped(length: int) -> tuple[mmap.mmap, int]:
    """Return new memory, and where the first large page in it begins."""
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A system may have no large pages.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE


ROOM = WeightRoom()


def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor for weights, in large pages where the system has them. What it holds is not defined."""
    count = math.prod(sizes)
    size = count * dtype.itemsize
    if size < LEAST_BYTES:
        return torch.empty(sizes, dtype=dtype)
    memory, place = ROOM.take(size)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place).view(sizes)
