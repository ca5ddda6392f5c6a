"""Chooses what a request loads and what it computes: where more of a prompt lies, and what bringing it saves.

A sequence can start only at a resume point. Loading and computing both take time in proportion to tokens, apart from
the state. So of the points of one tier only a few can be best: the deepest, and those up to which a tier above has all
pages, where only a state is missing. What lies between is never better than both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from weft.memory.keys import Key
from weft.memory.misses import Miss
from weft.memory.tiers.link import TierLink
from weft.memory.tiers.loads import Load
from weft.memory.tiers.rates import load_pays
from weft.memory.trie import Node, resume_at_or_above

# A load that makes no progress is given up after this time, or as long as computing takes, if that is longer.
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """Where more of a prompt lies, and what bringing it costs. Seconds are None until the rates are measured."""

    level: int
    node: Node
    tokens: int  # that a request could resume at
    load_bytes: int  # over all links
    load_seconds: float | None  # with what is queued before it
    compute_seconds: float | None  # with what is to be computed before it

    @property
    def pays(self) -> bool:
        return load_pays(self.load_seconds, self.compute_seconds)

    @property
    def saved_seconds(self) -> float:
        """What loading saves; infinite until the rates are measured, because a load measures them."""
        if self.load_seconds is None or self.compute_seconds is None:
            return inf
        return self.compute_seconds - self.load_seconds


class LoadChoice:
    """`links` are those of all tiers, nearest first."""

    def __init__(self, links: Sequence[TierLink], cell: int) -> None:
        self._links = links
        self._cell = cell
        # Tokens that are computed before those of a request that starts now.
        self.ahead_tokens = 0
        # By level: the links that bring a prefix to the device, its own first.
        self._ways = [list(_way_up(link, links)) for link in links]

    def find(self, keys: list[Key], limit: int, match: Miss) -> list[FoundPrefix]:
        """Return where more of a prompt lies than `match`, what saves most first.

        Of a farther tier, only what is deeper than everything in the nearer ones.
        """
        found: list[FoundPrefix] = []
        deepest = match.cached
        for link in self._links:
            places = {node.depth: node for node in self._places(link, keys, limit)}
            more = [node for depth, node in places.items() if depth * self._cell > deepest]
            found += [self._source(link, keys, node, match) for node in more]
            deepest = max([deepest, *(node.depth * self._cell for node in more)])
        return sorted(found, key=lambda each: (-each.saved_seconds, -each.tokens))

    def _places(self, link: TierLink, keys: list[Key], limit: int) -> Iterator[Node]:
        """Yield the cells of a tier where a request could best resume."""
        deepest = link.deepest(keys, limit)
        if deepest is None:
            return
        yield deepest
        if not link.lower.point_bytes or link.transient:
            return
        for each in self._ways[link.level]:
            above = each.upper.trie.deepest(keys[: deepest.depth - 1])
            point = None if above is None else resume_at_or_above(link.lower.trie.nodes.get(above.key))
            if point is not None:
                yield point.node

    def _source(self, link: TierLink, keys: list[Key], node: Node, match: Miss) -> FoundPrefix:
        way = self._ways[link.level]
        sizes = [each.load_bytes(keys, node) for each in way]
        seconds = _sum(
            each.rates.load_seconds(size + each.loads.queued_bytes) for each, size in zip(way, sizes, strict=True)
        )
        tokens = node.depth * self._cell
        compute = self._compute_seconds(tokens - match.cached)
        return FoundPrefix(link.level, node, tokens, sum(sizes), seconds, compute)

    def _compute_seconds(self, tokens: int) -> float | None:
        """Return how long a request waits until these tokens are computed."""
        return self._links[0].rates.compute_seconds(self.ahead_tokens + tokens)

    def is_late(self, link: TierLink, load: Load, cached: int, silent_seconds: float) -> bool:
        """Return whether computing is faster than what is left of a load, for a request that could start at `cached`.

        `silent_seconds`: how long the load has made no progress.
        """
        compute = self._compute_seconds(load.end * self._cell - cached)
        if compute is None:
            return False
        left = link.rates.load_seconds(link.loads.bytes_up_to(load))
        above = (
            each.rates.load_seconds(each.load_bytes(load.keys, load.source)) for each in self._ways[link.level][1:]
        )
        total = _sum([left, *above])
        return silent_seconds > max(PATIENCE_SECONDS, compute) or (total is not None and total > compute)


def _way_up(link: TierLink, links: Sequence[TierLink]) -> Iterator[TierLink]:
    """Yield the links from one to the device."""
    here: TierLink | None = link
    while here is not None:
        yield here
        upper = here.upper
        here = next((each for each in links if each.lower is upper), None)


def _sum(parts: Iterator[float | None] | list[float | None]) -> float | None:
    """Return the sum, or None if a part is not known."""
    known = list(parts)
    return None if any(part is None for part in known) else sum(part or 0.0 for part in known)
