"""Prefixes that a caller retains: protected against eviction until a time, up to a share of memory for each tenant.

A retention is a value: a cell of the trie, whose it is, and until when. While it lasts, the cell is pinned, so its path
stays, and its resume point is marked, so it is no candidate for eviction. Admission counts both as held. Nothing else
of the memory knows retentions: at its end the pin goes, and the prefix is ranked like any other.

With host memory, a retained prefix moves there when a request finds no memory beside it: it is copied, then protected
there instead, by the same retention. A request that continues it loads it, like anything else that lies there.
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
from weft.memory.eviction import Candidate
from weft.memory.keys import Key
from weft.memory.misses import Miss, Reason
from weft.memory.recent_keys import RecentKeys
from weft.memory.tiers.saves import Saves
from weft.memory.trie import Node, path, resume_at_or_above

# Of memory, for the retained prefixes of all tenants together, unless one tenant may have more.
SHARE_OF_ALL = 0.5
# Lost retentions that are remembered, to explain later misses.
MOST_LOST = 1 << 12
# What happens to retentions: the last ones end them.
EVENTS = ("kept", "refused", "moved", "released", "expired", "over_share", "given_up", "dropped")
_LOSSES = (Reason.EVICTED, Reason.STATE_EVICTED, Reason.STATE_SKIPPED, Reason.NEVER_COMPUTED)


@dataclass(frozen=True, slots=True)
class Retention:
    """`cache` is the tier that protects it, and `node` its cell there. `window` counts its point's window pages."""

    node: Node
    cache: Cache
    holder: bytes
    until: float
    has_point: bool
    window: int


class Tally:
    """The bytes of several retained prefixes: cells that several of them need count once."""

    def __init__(self) -> None:
        self.cells: Counter[Key] = Counter()
        self.bytes = 0

    def count(self, each: Retention, sign: int) -> None:
        """Add or take away a retention."""
        for node in path(each.node):
            self.cells[node.key] += sign
            self.bytes += sign * each.cache.spec.page_bytes * (self.cells[node.key] == (sign > 0))
            if not self.cells[node.key]:
                del self.cells[node.key]
        self.bytes += sign * each.has_point * each.cache.point_bytes


class Retentions(Companion):
    """`share` is the part of memory that one tenant's may take, `now` a clock in seconds. `below` saves to host memory,
    if there is some."""

    def __init__(
        self, cache: Cache, share: float, memory_bytes: int, now: Callable[[], float], below: Saves | None = None
    ) -> None:
        self._cache = cache
        self._now = now
        self._below = below
        self._most_bytes = int(share * memory_bytes)
        self._most_of_all = int(max(share, SHARE_OF_ALL if share else 0) * memory_bytes)
        arena = None if below is None else below.lower.arena
        self._most_below = 0 if arena is None else int(SHARE_OF_ALL * arena.slabs * arena.slab_bytes)
        self._held: dict[Key, Retention] = {}
        self._tallies: defaultdict[bytes, Tally] = defaultdict(Tally)  # by tenant
        self._tally_below = Tally()
        # On their way to host memory, by their bytes on the device; and those of which a copy has failed.
        self._moving: dict[Key, int] = {}
        self._stuck: set[Key] = set()
        # What requests lack beside what is retained, since the last step.
        self._lacking_bytes = 0
        self._ends: list[tuple[float, Key]] = []
        self._lost = RecentKeys(MOST_LOST)
        self.counts: Counter[str] = Counter()
        # On the device.
        self._here = self.points = self.window_pages = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        return sum(each.bytes for each in self._tallies.values())

    def bytes_of(self, holder: bytes) -> int:
        return self._tallies[holder].bytes if holder in self._tallies else 0

    def nodes(self, cache: Cache) -> Iterator[Node]:
        """Yield the cells of a tier that retentions protect."""
        return (each.node for each in self._held.values() if each.cache is cache)

    def seconds_left(self, cache: Cache) -> dict[Key, float]:
        """Return how long each retained cell of a tier, with the prefix that it ends, stays so."""
        return {key: each.until - self._now() for key, each in self._held.items() if each.cache is cache}

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
        found = Retention(
            node, self._cache, holder, until, point is not None, 0 if point is None else len(point.window)
        )
        self._protect(found)
        self._tallies[holder].count(found, 1)
        self._lost.pop(node.key)
        self.counts["kept"] += 1

    def _protect(self, each: Retention) -> None:
        """Keep a prefix from being evicted from its tier."""
        self._held[each.node.key] = each
        each.cache.trie.pin(each.node)
        if each.node.resume is not None:
            each.node.resume.retained = True
        self._count_place(each, 1)

    def _unprotect(self, each: Retention) -> None:
        point = each.node.resume
        if point is not None:
            point.retained = False
            each.cache.valuation.offer(point)
        each.cache.unpin(each.node)
        self._count_place(each, -1)

    def _count_place(self, each: Retention, sign: int) -> None:
        if each.cache is not self._cache:
            self._tally_below.count(each, sign)
            return
        self._here += sign
        self.points += sign * each.has_point
        self.window_pages += sign * each.window

    def _shrink(self, holder: bytes) -> None:
        """Give up what ends soonest: of this tenant beyond its share, of the largest one beyond the share of all."""
        self._shrink_to(holder, self._most_bytes)
        while (over := self.held_bytes - self._most_of_all) > 0:
            largest = max(self._tallies, key=self.bytes_of)
            self._shrink_to(largest, max(0, self.bytes_of(largest) - over))
        self._tidy()

    def _shrink_to(self, holder: bytes, most: int) -> None:
        if self.bytes_of(holder) <= most:
            return
        own = [each for each in self._held.values() if each.holder == holder]
        for each in sorted(own, key=lambda each: each.until):
            if self.bytes_of(holder) > most:
                self._lose(each, "over_share")

    def _lose(self, each: Retention, how: str) -> None:
        """End a retention before its time, and remember that for the miss that may follow."""
        self._lost.add(each.node.key, int(each.until * 1000))
        self._end(each, how)

    def _end(self, each: Retention, how: str) -> None:
        del self._held[each.node.key]
        self._stuck.discard(each.node.key)
        self.counts[how] += 1
        tally = self._tallies[each.holder]
        tally.count(each, -1)
        if not tally.cells:
            del self._tallies[each.holder]
        self._unprotect(each)

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

    def give_up(self, below: bool = True) -> None:
        """End all retentions of the device, because nothing else is left to evict; `below`: those in host memory too,
        because the caller flushes the cache."""
        for each in list(self._held.values()):
            if below or each.cache is self._cache:
                self._lose(each, "given_up")

    # the way to host memory -----------------------------------------------------------------------------------------

    def make_room(self, lacking_bytes: int) -> bool:
        """Return whether retained prefixes move to host memory, because a request lacks memory beside them."""
        self._lacking_bytes = max(self._lacking_bytes, lacking_bytes)
        return bool(self._moving) or self._next_to_move() is not None

    def may_be_below(self, keys: Sequence[Key]) -> bool:
        """Return whether retained prefixes in host memory begin as these keys do."""
        return bool(keys) and keys[0] in self._tally_below.cells

    def launch(self) -> None:
        """Begin to copy the next prefix that is in the way of a request."""
        if sum(self._moving.values()) < self._lacking_bytes and self._below is not None and not self._below.waiting:
            each = self._next_to_move()
            if each is not None:
                self._move(each, self._below)
        self._lacking_bytes = 0

    def _next_to_move(self) -> Retention | None:
        """Return what was retained first of what nothing else on the device needs, if host memory may take it."""
        if self._below is None or not self._here:
            return None
        for key, each in self._held.items():
            here = each.cache is self._cache and key not in self._moving and key not in self._stuck
            if here and each.node.holders == 1:
                return each if self._tally_below.bytes + self._bytes_alone(each) <= self._most_below else None
        return None

    def _bytes_alone(self, each: Retention) -> int:
        return each.node.depth * self._cache.spec.page_bytes + each.has_point * self._cache.point_bytes

    def _move(self, each: Retention, below: Saves) -> None:
        key = each.node.key
        self._moving[key] = self._cache.valuation.reach_bytes(_candidate(each))

        def done() -> None:
            del self._moving[key]
            # It may have ended, or been renewed, meanwhile.
            found = self._held.get(key)
            if found is None or found.cache is not self._cache:
                return
            if not below.has(found.node):
                self._stuck.add(key)
                return
            self._unprotect(found)
            self._cache.valuation.stage(_candidate(found))
            self._protect(replace(found, node=below.lower.trie.nodes[key], cache=below.lower))
            self.counts["moved"] += 1

        # Anything else there gives way to it.
        below.begin(each.node, None, done)

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
        tokens = self._cache.cell * sum(len(each.cells) for each in self._tallies.values())
        held = {"count": len(self._held), "bytes": self.held_bytes, "tokens": tokens}
        return held | {"host_bytes": self._tally_below.bytes} | {name: self.counts[name] for name in EVENTS}


def _candidate(each: Retention) -> Candidate:
    return each.node if each.node.resume is None else each.node.resume
