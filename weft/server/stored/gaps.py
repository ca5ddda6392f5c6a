"""Free blocks of a file, joined where they touch. Taking and giving back take logarithmic time."""

from __future__ import annotations

from bisect import bisect_left, insort


class Gaps:
    """Gaps of numbered blocks. Of those with room, the smallest is taken, so that large ones stay.

    >>> gaps = Gaps()
    >>> gaps.give(1, 10)
    >>> gaps.take(3), gaps.take(3), gaps.take(5)
    (1, 4, None)
    >>> gaps.give(1, 3); gaps.take(2), gaps.take(4)
    (1, 7)
    """

    def __init__(self) -> None:
        # By size: where gaps begin. There are few different sizes, because all gaps lie in one file.
        self._starts: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}

    def take(self, blocks: int) -> int | None:
        """Return the first of a number of adjacent blocks, which are free no longer; None: no gap has room."""
        place = bisect_left(self._sizes, blocks)
        if place == len(self._sizes):
            return None
        start, _ = self._starts[self._sizes[place]].popitem()
        size = self._remove(start)
        if size > blocks:
            self._add(start + blocks, size - blocks)
        return start

    def give(self, start: int, blocks: int) -> None:
        """Make blocks free, which must not be free yet."""
        if blocks <= 0:
            return
        after, before = start + blocks, self._start_before.get(start)
        if after in self._size_at:
            blocks += self._remove(after)
        if before is not None:
            blocks += self._remove(before)
            start = before
        self._add(start, blocks)

    def _add(self, start: int, blocks: int) -> None:
        if blocks not in self._starts:
            self._starts[blocks] = {}
            insort(self._sizes, blocks)
        self._starts[blocks][start] = None
        self._size_at[start] = blocks
        self._start_before[start + blocks] = start

    def _remove(self, start: int) -> int:
        blocks = self._size_at.pop(start)
        self._starts[blocks].pop(start, None)
        del self._start_before[start + blocks]
        if not self._starts[blocks]:
            del self._starts[blocks], self._sizes[bisect_left(self._sizes, blocks)]
        return blocks
