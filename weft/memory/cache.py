"""What is remembered beyond the sequences that computed it: trie, resume points, and what must go for new things.

The ledger's other half: it knows no leases, only pins and owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.base.grid import floor_to_grid
from weft.memory.arena import Arena
from weft.memory.eviction import POLICIES, Candidate, Ranking
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.misses import Ghosts, Miss, Reason, Tenants
from weft.memory.spec import MemorySpec
from weft.memory.trie import Node, ResumePoint, Trie, resume_at_or_above

# An optional snapshot may push out at most this many times its own bytes.
OPTIONAL_EVICTION = 2


@dataclass(slots=True)
class Counts:
    """What has happened so far, for metrics."""

    lookups: int = 0
    tokens_asked: int = 0
    tokens_cached: int = 0
    tokens_resumed: int = 0  # by sequences that came back after they had given way
    misses: Counter[Reason] = field(default_factory=Counter)
    tokens_lost: Counter[Reason] = field(default_factory=Counter)
    captures_kept: int = 0
    captures_skipped: int = 0
    evicted_pages: int = 0
    evicted_points: int = 0


class Cache:
    def __init__(self, spec: MemorySpec, arena: Arena, eviction: str) -> None:
        self.spec = spec
        self.arena = arena
        self.trie = Trie()
        self.ghosts = Ghosts()
        self.tenants = Tenants()
        self.counts = Counts()
        self.clock = 0
        # Position that each live slot was written for: a slot is read only by rows at that position.
        self.written_for: dict[int, int] = {}
        # What a resume point costs beyond the pages; 0: every node is one, for free.
        self.point_bytes = spec.state_bytes + spec.window_cells * spec.window_page_bytes
        self._point_of_slot: dict[int, ResumePoint] = {}
        self._rate: Callable[[int, int, int], float] = POLICIES[eviction]
        self._ranking = Ranking(self._score, self._evictable)

    # lookups --------------------------------------------------------------------------------------------------------

    def match(self, keys: list[Key], limit: int, plain: Key | None = None) -> Miss:
        cell = self.spec.cell
        reusable = min(floor_to_grid(limit, cell), len(keys) * cell)
        node = self.trie.deepest(keys[: reusable // cell])
        matched = node.depth * cell if node else 0
        cached = matched
        if self.point_bytes:
            point = resume_at_or_above(node)
            cached = point.node.depth * cell if point else 0
        reason = self._reason(keys, reusable, matched, cached)
        if reason is Reason.NEVER_COMPUTED and not matched and self.tenants.others(plain, keys[0]):
            reason = Reason.OTHER_SALT
        return Miss(reason, cached, matched, reusable, reusable - cached)

    def _reason(self, keys: list[Key], reusable: int, matched: int, cached: int) -> Reason:
        if reusable == 0:
            return Reason.BELOW_GRID
        if cached == reusable:
            return Reason.NOTHING_MORE
        if matched > cached:
            return self.ghosts.reason(b"state" + keys[matched // self.spec.cell - 1], Reason.STATE_NEVER_KEPT)
        return self.ghosts.reason(keys[matched // self.spec.cell], Reason.NEVER_COMPUTED)

    def looked_up(self, plain: Key | None, keys: list[Key]) -> None:
        """A lease was opened: the clock of recency goes on."""
        self.clock += 1
        if plain is not None and keys:
            self.tenants.add(plain, keys[0])

    def count(self, miss: Miss, again: bool) -> None:
        """A request started; `again` if it had given way before: that tells nothing of the cache's worth."""
        if again:
            self.counts.tokens_resumed += miss.cached
            return
        self.counts.lookups += 1
        self.counts.tokens_asked += miss.reusable
        self.counts.tokens_cached += miss.cached
        self.counts.misses[miss.reason] += 1
        self.counts.tokens_lost[miss.reason] += miss.tokens_lost

    # pins -----------------------------------------------------------------------------------------------------------

    def pin(self, node: Node) -> tuple[int | None, tuple[int, ...]]:
        """Start from a node: protects its path, and gives an ownership of its checkpoint and window pages."""
        node.pins += 1
        node.hits += 1
        node.used = self.clock
        point = node.resume
        if point is None:
            assert not self.point_bytes
            return None, ()
        point.hits += 1
        point.used = self.clock
        if point.slot is not None:
            self.arena.share(Kind.STATE, point.slot)
        for page in point.window:
            self.arena.share(Kind.WINDOW, page)
        return point.slot, point.window

    def unpin(self, node: Node | None) -> None:
        if node is None:
            return
        node.pins -= 1
        node.used = self.clock
        self._offer(node)

    def release_slot(self, slot: int | None) -> None:
        if slot is None:
            return
        self.arena.release(Kind.STATE, slot)
        if slot not in self.arena.owners[Kind.STATE]:
            self.written_for.pop(slot, None)
        elif slot in self._point_of_slot:
            self._offer(self._point_of_slot[slot])

    # remembering ----------------------------------------------------------------------------------------------------

    def publish(self, key: Key, parent: Node | None, page: int | None) -> Node:
        """Enter a computed cell; takes over its page, or gives it back if the cell is known already."""
        node = self.trie.nodes.get(key)
        if node is None:
            self.ghosts.forget(key)
            return self.trie.insert(key, parent, page, self.clock)
        node.used = self.clock
        if page is not None and page != node.page:
            self.arena.release(Kind.PAGE, page)
        return node

    def keep(self, key: Key, slot: int | None, window: tuple[int, ...]) -> None:
        """Make a node a resume point (unless it is one), as a further owner of its slot and window pages."""
        node = self.trie.nodes[key]
        if node.resume is not None:
            node.resume.used = self.clock
            return
        if slot is not None:
            self.arena.share(Kind.STATE, slot)
        for page in window:
            self.arena.share(Kind.WINDOW, page)
        node.resume = ResumePoint(node, slot, window, self.clock)
        if slot is not None:
            self._point_of_slot[slot] = node.resume
        self.counts.captures_kept += 1
        self.ghosts.forget(b"state" + key)
        self._offer(node.resume)

    def skipped(self, keys: list[Key], position: int) -> None:
        """There was no room for a snapshot: counted, and remembered as a reason."""
        self.counts.captures_skipped += 1
        depth = position // self.spec.cell
        if depth <= len(keys):
            self.ghosts.add(b"state" + keys[depth - 1], Reason.STATE_SKIPPED)

    # making room ----------------------------------------------------------------------------------------------------

    def take(self, kind: Kind, optional: bool = False) -> int | None:
        """A unit, if need be at the price of what is worth least."""
        unit = self.arena.take(kind)
        spent = 0
        while unit is None:
            if optional and spent >= OPTIONAL_EVICTION * self.arena.unit_bytes[kind]:
                return None
            victim = self._ranking.pop()
            if victim is None:
                return None
            spent += self._bytes(victim)
            self._evict(victim)
            unit = self.arena.take(kind)
        return unit

    def clear(self) -> None:
        """Forget everything that no running sequence uses."""
        while (victim := self._ranking.pop()) is not None:
            self._evict(victim)
        self.ghosts.clear()

    def _evict(self, victim: Candidate) -> None:
        if isinstance(victim, ResumePoint):
            self._evict_point(victim)
            return
        self.trie.cut(victim)
        if victim.page is not None:
            self.arena.release(Kind.PAGE, victim.page)
        self.counts.evicted_pages += 1
        self.ghosts.add(victim.key, Reason.EVICTED)
        if victim.parent:
            # Whoever used the cell used the one before it too.
            victim.parent.used = max(victim.parent.used, victim.used)
            self._offer(victim.parent)

    def _evict_point(self, point: ResumePoint) -> None:
        point.node.resume = None
        if point.slot is not None:
            del self._point_of_slot[point.slot]
            self.release_slot(point.slot)
        for page in point.window:
            self.arena.release(Kind.WINDOW, page)
        self.counts.evicted_points += 1
        self.ghosts.add(b"state" + point.node.key, Reason.STATE_EVICTED)
        self._offer(point.node)

    def _offer(self, candidate: Candidate) -> None:
        if self._evictable(candidate):
            self._ranking.offer(candidate)

    def _evictable(self, candidate: Candidate) -> bool:
        if isinstance(candidate, ResumePoint):
            if candidate.node.resume is not candidate:
                return False
            return candidate.slot is None or self.arena.owners[Kind.STATE][candidate.slot] == 1
        leaf = candidate.children == 0 and candidate.pins == 0 and candidate.resume is None
        return leaf and self.trie.nodes.get(candidate.key) is candidate

    def _bytes(self, candidate: Candidate) -> int:
        if isinstance(candidate, ResumePoint):
            return self.point_bytes
        return self.spec.page_bytes

    def _score(self, candidate: Candidate) -> float:
        cell = self.spec.cell
        if isinstance(candidate, ResumePoint):
            above = resume_at_or_above(candidate.node.parent)
            cells = candidate.node.depth - (above.node.depth if above else 0)
            # At the end of a path it also keeps alive the pages that nobody could start from without it.
            pages = 0 if candidate.node.children else cells * self.spec.page_bytes
            return self._rate(cells * cell, self.point_bytes + pages, candidate.used)
        # A leaf without a resume point can be no one's start: it only shows where sequences part.
        tokens = cell // 2 if self.point_bytes else cell
        return self._rate(tokens, self.spec.page_bytes or self.point_bytes, candidate.used)
