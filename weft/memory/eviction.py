"""What to give up when memory runs out: a ranking of candidates. Frees nothing; the ledger asks and acts.

A score must not depend on the time of asking, so that a heap stays in order as the clock goes on. "Value times
recency per byte" becomes that by its logarithm: log(tokens / bytes) + last use / half-life.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import log2

from weft.memory.trie import Node, ResumePoint

Candidate = Node | ResumePoint
# (tokens that would have to be computed again, bytes that come free, clock of the last use) -> lowest goes first
Score = Callable[[int, int, int], float]

HALF_LIFE = 8.0
# How many uses of recency the best ratio of work to bytes is worth.
FLOP_WEIGHT = 64.0


def by_value(tokens: int, size: int, used: int) -> float:
    return log2(max(tokens, 1) / max(size, 1)) + used / HALF_LIFE


def by_recency(tokens: int, size: int, used: int) -> float:
    return float(used)


def by_flops(tokens: int, size: int, used: int) -> float:
    """Recency plus work saved per byte, as Marconi (Pan et al., 2024) weighs them; work is proportional to tokens."""
    return used + FLOP_WEIGHT * tokens / max(size, 1)


POLICIES: dict[str, Score] = {"value": by_value, "lru": by_recency, "flops": by_flops}


class Ranking:
    """Candidates in order of their score, with lazy updates: an outdated entry is recognised when it comes up."""

    def __init__(self, score: Callable[[Candidate], float], evictable: Callable[[Candidate], bool]) -> None:
        self._score = score
        self._evictable = evictable
        self._heap: list[tuple[float, int, int, Candidate]] = []
        self._offers = 0
        self._candidates = 0

    def offer(self, candidate: Candidate) -> None:
        """Consider a candidate (again): call when it became evictable."""
        self._offers += 1
        candidate.stamp = self._offers
        heappush(self._heap, (self._score(candidate), self._offers, self._offers, candidate))
        if len(self._heap) > 64 + 4 * self._candidates:
            self._tidy()

    def pop(self) -> Candidate | None:
        """The candidate that is worth least now."""
        while self._heap:
            score, _, stamp, candidate = heappop(self._heap)
            if stamp != candidate.stamp or not self._evictable(candidate):
                continue
            now = self._score(candidate)
            if now > score:
                # Used since it was ranked.
                self._offers += 1
                heappush(self._heap, (now, self._offers, stamp, candidate))
                continue
            candidate.stamp = 0
            return candidate
        return None

    def _tidy(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2] == entry[3].stamp and self._evictable(entry[3])]
        heapify(self._heap)
        self._candidates = len(self._heap)
