"""A heap whose entries become outdated while they are in it: they are skipped at the top, and swept out bit by bit.

No call takes time in proportion to the entries, because steps wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[object, ...])

# A sweep begins when there are this many times as many entries as the last one kept, and a few more.
GROWTH, FEWEST = 4, 64
# Entries that are swept with each new one.
SWEPT = 8


class TidyHeap(Generic[Entry]):
    """`renewed` returns an entry as it would be pushed now, or None if it is outdated."""

    def __init__(self, renewed: Callable[[Entry], Entry | None]) -> None:
        self._renewed = renewed
        self._heap: list[Entry] = []
        # What has not been swept yet. Without its last entry, a heap is still one.
        self._unswept: list[Entry] = []
        self._kept = 0

    def __len__(self) -> int:
        return len(self._heap) + len(self._unswept)

    def push(self, entry: Entry) -> None:
        heappush(self._heap, entry)
        if self._unswept:
            self._sweep()
        elif len(self._heap) > FEWEST + GROWTH * self._kept:
            self._unswept, self._heap = self._heap, self._unswept

    def _sweep(self) -> None:
        for _ in range(min(SWEPT, len(self._unswept))):
            entry = self._renewed(self._unswept.pop())
            if entry is not None:
                heappush(self._heap, entry)
        if not self._unswept:
            self._kept = len(self._heap)

    def first(self) -> Entry | None:
        """Return the least entry, outdated or not."""
        heap = self._least()
        return heap[0] if heap else None

    def pop(self) -> Entry:
        """Remove and return the least entry."""
        return heappop(self._least())

    def _least(self) -> list[Entry]:
        heap, unswept = self._heap, self._unswept
        return unswept if unswept and (not heap or unswept[0] < heap[0]) else heap
