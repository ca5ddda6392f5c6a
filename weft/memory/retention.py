"""Prefixes that a caller retains: protected against eviction until a time, up to a share of memory for each tenant.

A retention is a value: a cell of the trie, whose it is, and until when. While it lasts, the cell is pinned, so its path
stays, and its resume point is marked, so it is no candidate for eviction. Admission counts both as held. Nothing else
of the memory knows retentions: at its end the pin goes, and the prefix is ranked like any other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any

from weft.base.companions import Companion
from weft.base.retain import Retain
from weft.memory.cache import Cache
from weft.memory.captures import repeatable
from weft.memory.keys import Key
from weft.memory.misses import Miss, Reason
from weft.memory.recent_keys import RecentKeys
from weft.memory.trie import Node, path, resume_at_or_above

# Of memory, for the retained prefixes of all tenants together, unless one tenant may have more.
SHARE_OF_ALL = 0.5
# Lost retentions that are remembered, to explain later misses.
MOST_LOST = 1 << 12
# What happens to retentions: the last ones end them.
EVENTS = ("kept", "refused", "released", "expired", "over_share", "given_up", "dropped")
_LOSSES = (Reason.EVICTED, Reason.STATE_EVICTED, Reason.STATE_SKIPPED, Reason.NEVER_COMPUTED)


@dataclass(frozen=True, slots=True)
class Retention:
    """`window` counts the window pages of its resume point."""

    node: Node
    holder: bytes
    until: float
    has_point: bool
    window: int


class Retentions(Companion):
    """`share` is the part of memory that one tenant's may take, `now` a clock in seconds."""

    def __init__(self, cache: Cache, share: float, memory_bytes: int, now: Callable[[], float]) -> None:
        self._cache = cache
        self._now = now
        self._most_bytes = int(share * memory_bytes)
        self._most_of_all = int(max(share, SHARE_OF_ALL if share else 0) * memory_bytes)
        self._held: dict[Key, Retention] = {}
        # By tenant: how many of its retentions need each cell, and the bytes of all.
        self._cells: defaultdict[bytes, Counter[Key]] = defaultdict(Counter)
        self._bytes: Counter[bytes] = Counter()
        self._ends: list[tuple[float, Key]] = []
        self._lost = RecentKeys(MOST_LOST)
        self.counts: Counter[str] = Counter()
        self.points = self.window_pages = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        return sum(self._bytes.values())

    def bytes_of(self, holder: bytes) -> int:
        return self._bytes[holder]

    def nodes(self) -> Iterator[Node]:
        return (each.node for each in self._held.values())

    def seconds_left(self) -> dict[Key, float]:
        """Return how long each retained cell, with the prefix that it ends, stays so."""
        return {key: each.until - self._now() for key, each in self._held.items()}

    # the life of a retention ----------------------------------------------------------------------------------------

    def ask(self, asked: Sequence[Retain], keys: Sequence[Key], prompt: int, holder: bytes) -> None:
        """Do what a sequence that has ended asked for: a prompt of this length with its answer, both published.

        All of it is two places: where the next turn resumes, and where the same prompt does, sent again.
        """
        for each in asked:
            if not each.seconds:
                self._release_path(keys, holder)
                continue
            cell = self._cache.cell
            ends = [len(keys) * cell, repeatable(prompt, cell)] if each.tokens is None else [each.tokens]
            for node in dict.fromkeys(self._cache.trie.deepest(keys[: end // cell]) for end in ends):
                if node is not None:
                    self._keep(node, holder, self._now() + each.seconds)

    def _keep(self, node: Node, holder: bytes, until: float) -> None:
        """Retain the deepest place at or above a cell from which a sequence can start."""
        point = resume_at_or_above(node)
        if not self._most_bytes or (self._cache.point_bytes and point is None):
            self.counts["refused"] += 1
            return
        node = node if point is None else point.node
        known = self._held.get(node.key)
        if known is not None:
            until = max(until, known.until)
            self._held[node.key] = replace(known, until=until)
        else:
            self._hold(node, holder, until)
        heappush(self._ends, (until, node.key))
        self._shrink(holder)

    def _hold(self, node: Node, holder: bytes, until: float) -> None:
        point = node.resume
        self._cache.trie.pin(node)
        if point is not None:
            point.retained = True
        found = Retention(node, holder, until, point is not None, 0 if point is None else len(point.window))
        self._held[node.key] = found
        self._lost.pop(node.key)
        self.counts["kept"] += 1
        self._count(found, 1)

    def _count(self, each: Retention, sign: int) -> None:
        """Add or take away what a retention holds. Cells that several of a tenant need count once."""
        cells, size = self._cells[each.holder], 0
        for node in path(each.node):
            cells[node.key] += sign
            size += self._cache.spec.page_bytes * (cells[node.key] == (sign > 0))
            if not cells[node.key]:
                del cells[node.key]
        self.points += sign * each.has_point
        self.window_pages += sign * each.window
        self._bytes[each.holder] += sign * (size + each.has_point * self._cache.point_bytes)
        if not cells:
            del self._cells[each.holder], self._bytes[each.holder]

    def _shrink(self, holder: bytes) -> None:
        """Give up what ends soonest: of this tenant beyond its share, of the largest one beyond the share of all."""
        self._shrink_to(holder, self._most_bytes)
        while (over := self.held_bytes - self._most_of_all) > 0:
            largest = max(self._bytes, key=lambda each: self._bytes[each])
            self._shrink_to(largest, self._bytes[largest] - min(over, self._bytes[largest]))
        self._tidy()

    def _shrink_to(self, holder: bytes, most: int) -> None:
        if self._bytes[holder] <= most:
            return
        own = [each for each in self._held.values() if each.holder == holder]
        for each in sorted(own, key=lambda each: each.until):
            if self._bytes[holder] > most:
                self._lose(each, "over_share")

    def _lose(self, each: Retention, how: str) -> None:
        """End a retention before its time, and remember that for the miss that may follow."""
        self._lost.add(each.node.key, int(each.until * 1000))
        self._end(each, how)

    def _end(self, each: Retention, how: str) -> None:
        del self._held[each.node.key]
        self.counts[how] += 1
        self._count(each, -1)
        point = each.node.resume
        if point is not None:
            point.retained = False
            self._cache.valuation.offer(point)
        self._cache.unpin(each.node)

    def _tidy(self) -> None:
        """Forget old ends of retentions that were renewed or given up, once they are the most."""
        if len(self._ends) > 16 + 2 * len(self._held):
            self._ends = [(each.until, key) for key, each in self._held.items()]
            heapify(self._ends)

    def land(self) -> None:
        """End the retentions whose time is over."""
        while self._ends and self._ends[0][0] <= self._now():
            until, key = heappop(self._ends)
            found = self._held.get(key)
            if found is not None and found.until <= until:
                self._end(found, "expired")

    def _release_path(self, keys: Sequence[Key], holder: bytes) -> None:
        for key in keys:
            found = self._held.get(key)
            if found is not None and found.holder == holder:
                self._end(found, "released")

    def drop(self, chosen: Callable[[Node], bool]) -> None:
        """End the retentions of cells that an operator drops."""
        for each in [each for each in self._held.values() if chosen(each.node)]:
            self._end(each, "dropped")

    def give_up(self) -> None:
        """End all retentions: nothing else is left to evict, or the caller flushes the cache."""
        for each in list(self._held.values()):
            self._lose(each, "given_up")

    # what is reported -----------------------------------------------------------------------------------------------

    def explain(self, keys: Sequence[Key], miss: Miss) -> Miss:
        """Return a miss with its own reason if a retained prefix of these keys was lost before its time."""
        if miss.reason not in _LOSSES or not self._lost:
            return miss
        cell = self._cache.cell
        ends = (self._lost.get(key) for key in keys[miss.cached // cell : miss.reusable // cell])
        lost = any(end is not None and end > self._now() * 1000 for end in ends)
        return replace(miss, reason=Reason.RETAINED_LOST) if lost else miss

    def stats(self) -> dict[str, Any]:
        """Return gauges and counters for metrics."""
        held = {"count": len(self._held), "bytes": self.held_bytes, "tokens": self._cache.cell * self._held_cells()}
        return held | {name: self.counts[name] for name in EVENTS}

    def _held_cells(self) -> int:
        return sum(map(len, self._cells.values()))
