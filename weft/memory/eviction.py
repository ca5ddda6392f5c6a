"""Ranks what to evict when memory runs out. Frees nothing; the cache calls it and acts.

A policy is a pure function from the facts about a candidate to a number; the lowest is evicted first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weft.memory.tidy_heap import TidyHeap
from weft.memory.trie import Node, ResumePoint

Candidate = Node | ResumePoint
# A candidate's score, the order of equal ones, and the stamp that it had.
Ranked = tuple[float, int, int, Candidate]

# At about this depth, attention costs as much as everything else.
ATTENTION_DEPTH = 40_000


class CandidateFacts(NamedTuple):
    """The facts about a candidate that a published policy may use."""

    tokens: int  # that would have to be recomputed
    depth: int  # where they end
    size: int  # bytes that would be freed
    used: int  # the lookup of the last use


Policy = Callable[[CandidateFacts], float]


def by_value(rate: float, tokens: int, size: int) -> float:
    """Return the tokens that a byte saves per lookup: `rate` is the expected hits per lookup, learned from similar
    ones.

    Takes no `CandidateFacts`, since it is called thousands of times in a step.
    """
    return rate * tokens / size


def cheap(value: float) -> float:
    """Return a score in the same order, below any valued entry.

    >>> cheap(0.5) < cheap(2.0) < 0.0
    True
    """
    return -1.0 / value


def by_recency(facts: CandidateFacts) -> float:
    return float(facts.used)


def by_flops(alpha: float, span: float, best: float) -> Policy:
    """Return recency plus `alpha` times the work saved per byte, as Marconi (Pan et al., 2024) weighs them.

    Both are scaled to the range from 0 to 1: recency by the `span` of lookups that the cache reaches back, work per
    byte by the `best` in the cache. Scaled by the span, the score does not depend on the time of the call.
    """

    def score(facts: CandidateFacts) -> float:
        return facts.used + alpha * span * min(1.0, work_per_byte(facts) / best)

    return score


def work_per_byte(facts: CandidateFacts) -> float:
    """Return the work per byte; attention makes deep tokens more expensive."""
    return facts.tokens * (1 + (facts.depth - facts.tokens / 2) / ATTENTION_DEPTH) / max(facts.size, 1)


POLICIES = ("value", "lru", "flops")


class Flops:
    """The published policy with its normalisation, learned from what it evicts."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._span = 1.0
        self._best = 1e-12

    def __call__(self, facts: CandidateFacts) -> float:
        self._best = max(self._best, work_per_byte(facts))
        return by_flops(self.alpha, self._span, self._best)(facts)

    def evicted(self, age: int) -> None:
        self._span += (age - self._span) / 64


class Ranking:
    """Candidates in order of their score, with lazy updates: outdated entries are detected when they reach the top."""

    def __init__(self, score: Callable[[Candidate], float], evictable: Callable[[Candidate], bool]) -> None:
        self._score = score
        self._evictable = evictable
        self._heap = TidyHeap(self._renewed)
        self._offers = 0

    def offer(self, candidate: Candidate) -> None:
        """Add a candidate, or rank it again: call this when it becomes evictable."""
        self._offers += 1
        candidate.stamp = self._offers
        self._heap.push((self._score(candidate), self._offers, self._offers, candidate))

    def pop(self) -> Candidate | None:
        """Remove and return the least valuable candidate."""
        return self.pop_below(None)

    def pop_below(self, bound: float | None) -> Candidate | None:
        """Remove and return the least valuable candidate, if its score is below the bound."""
        while (first := self._heap.first()) is not None:
            score, _, stamp, candidate = first
            if bound is not None and score >= bound:
                return None
            self._heap.pop()
            if stamp != candidate.stamp or not self._evictable(candidate):
                continue
            now = self._score(candidate)
            if now > score:
                # It was used since it was ranked.
                self._offers += 1
                self._heap.push((now, self._offers, stamp, candidate))
                continue
            candidate.stamp = 0
            return candidate
        return None

    def _renewed(self, entry: Ranked) -> Ranked | None:
        """Return an entry with the score of today: what is learned about a class changes all of its members."""
        _, order, stamp, candidate = entry
        if stamp != candidate.stamp or not self._evictable(candidate):
            return None
        return self._score(candidate), order, stamp, candidate
