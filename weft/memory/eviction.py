"""What to give up when memory runs out: a ranking of candidates. Frees nothing; the cache asks and acts.

A policy is a pure function from what is known of a candidate to a number; the lowest goes first. The number must not
depend on the time of asking, so that a heap stays in order as the clock goes on. "Value that halves with every
half-life" becomes that by its logarithm: log2(value) + half-lives at the time of the last use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import log2

from weft.memory.trie import Node, ResumePoint

Candidate = Node | ResumePoint

# What was not used while everything else was replaced counts a quarter. A half-life lasts this many lookups at least.
HALF_LIVES_PER_TURNOVER = 2.0
SHORTEST_HALF_LIFE = 8.0
# Attention costs as much as everything else at about this depth.
ATTENTION_DEPTH = 40_000
# Below any score of something that can be hit.
WORTHLESS = -1e12
CHEAP = -1e9


@dataclass(frozen=True, slots=True)
class Facts:
    """What a policy may know of a candidate."""

    tokens: int  # that would have to be computed again
    depth: int  # where they end
    size: int  # bytes that come free
    used: int  # the lookup of the last use
    warmth: float = 0.0  # half-lives that had passed then
    uses: float = 1.0  # how often it was used, every use halved with every half-life since
    chance: float = 1.0  # that it will be wanted again, learned from others like it
    inherited: float = 0.0  # the wants of those below it that were given up


Policy = Callable[[Facts], float]


def by_value(facts: Facts) -> float:
    """Tokens saved, times how often it is wanted, per byte."""
    wants = facts.chance * facts.uses + facts.inherited
    return log2(wants * max(facts.tokens, 1) / max(facts.size, 1)) + facts.warmth


def by_recency(facts: Facts) -> float:
    return float(facts.used)


def by_flops(alpha: float, span: float, best: float) -> Policy:
    """Recency plus `alpha` times the work saved per byte, as Marconi (Pan et al., 2024) weighs them.

    Both are brought to the range from 0 to 1: recency by the `span` of lookups that the cache reaches back, work per
    byte by the `best` there is. Scaled by the span, the score does not depend on the time of asking.
    """

    def score(facts: Facts) -> float:
        return facts.used + alpha * span * min(1.0, work_per_byte(facts) / best)

    return score


def work_per_byte(facts: Facts) -> float:
    """Attention makes deep tokens dearer."""
    return facts.tokens * (1 + (facts.depth - facts.tokens / 2) / ATTENTION_DEPTH) / max(facts.size, 1)


POLICIES = ("value", "lru", "flops")


class Flops:
    """The published policy with what it normalises by: learned from what it evicts."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._span = 1.0
        self._best = 1e-12

    def __call__(self, facts: Facts) -> float:
        self._best = max(self._best, work_per_byte(facts))
        return by_flops(self.alpha, self._span, self._best)(facts)

    def evicted(self, age: int) -> None:
        self._span += (age - self._span) / 64


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
        return self.pop_below(None)

    def pop_below(self, bound: float | None) -> Candidate | None:
        """The candidate that is worth least now, if that is less than the bound."""
        while self._heap:
            score, _, stamp, candidate = self._heap[0]
            if bound is not None and score >= bound:
                return None
            heappop(self._heap)
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
        live = [entry for entry in self._heap if entry[2] == entry[3].stamp and self._evictable(entry[3])]
        # Scores are brought up to date too: what is learned of a class changes all of its members.
        self._heap = [(self._score(candidate), order, stamp, candidate) for _, order, stamp, candidate in live]
        heapify(self._heap)
        self._candidates = len(self._heap)
