"""Memory in pages of two megabytes, for what every step reads from end to end.

With pages of 4 KiB a processor waits for addresses as well as for bytes. Linux takes large ones by itself only where a
program asks for them, or does so for everything.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator

from torch import Tensor

# Of Linux: use large pages from now on; move to large ones what is there (since 6.1, and an error before).
HUGEPAGE, COLLAPSE = 14, 25
# Bytes between two ranges that are moved with them.
BETWEEN = 64 << 10


def use_large_pages(tensors: Iterable[Tensor]) -> None:
    """Move tensors of this process to large pages, where they lie. Where that cannot be done, nothing is."""
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    memories = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
    for start, end in joined((memory.data_ptr(), memory.data_ptr() + memory.nbytes()) for memory in memories):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        for advice in (HUGEPAGE, COLLAPSE):
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return ranges of which no two are near each other, as a large page lies inside of one.

    >>> list(joined([(1 << 20, 2 << 20), (0, 10), (20, 1 << 19), (5, 8)]))
    [(0, 524288), (1048576, 2097152)]
    """
    last: tuple[int, int] | None = None
    for start, end in sorted(ranges):
        if last is not None and start <= last[1] + BETWEEN:
            last = (last[0], max(last[1], end))
        else:
            if last is not None:
                yield last
            last = (start, end)
    if last is not None:
        yield last
