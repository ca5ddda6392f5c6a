"""The queue: which sequence is admitted next.

First come, first served within a priority, or longest reusable prefix first, with aging so that no request starves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from weft.engine.sequence import Sequence

# Number of requests at the head of the queue that one step considers.
WINDOW = 32
# Each step of waiting counts as this many reusable tokens.
TOKENS_PER_STEP_WAITED = 16


class WaitingQueue:
    def __init__(self, order: str, reusable: Callable[[Sequence], int]) -> None:
        self._by_prefix = order == "prefix"
        self._reusable = reusable
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def add(self, sequence: Sequence, now: int) -> None:
        sequence.waited_since = now
        insort(self._waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def head(self, now: int) -> list[Sequence]:
        """Return the next candidates, best first."""
        head = self._waiting[:WINDOW]
        if not self._by_prefix:
            return head

        def merit(sequence: Sequence) -> tuple[int, int]:
            waited = (now - sequence.waited_since) * TOKENS_PER_STEP_WAITED
            return sequence.request.priority, -(self._reusable(sequence) + waited)

        return sorted(head, key=merit)
