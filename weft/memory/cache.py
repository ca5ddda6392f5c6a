"""What is remembered beyond the sequences that computed it: trie, resume points, and what must go for new things.

The ledger's other half: it knows no leases, only pins and owners.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import log2

from weft.base.grid import floor_to_grid
from weft.memory.arena import Arena
from weft.memory.captures import Origin
from weft.memory.eviction import (
    CHEAP,
    HALF_LIVES_PER_TURNOVER,
    SHORTEST_HALF_LIFE,
    WORTHLESS,
    Candidate,
    Facts,
    Flops,
    Policy,
    Ranking,
    by_recency,
    by_value,
)
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.misses import Ghosts, Lost, Miss, Reason, Tenants
from weft.memory.popularity import MOST_PASSES, Popularity, class_of
from weft.memory.spec import MemorySpec
from weft.memory.trie import Node, ResumePoint, Trie, resume_at_or_above

# An optional snapshot may push out at most this many times its own bytes.
OPTIONAL_EVICTION = 2
# Lookups that an average reaches back.
AVERAGED = 256
# A state that was evicted this many half-lives ago would not have been kept by any policy.
REGRET = 4.0


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
    kept: Counter[Origin] = field(default_factory=Counter)
    hits: Counter[Origin] = field(default_factory=Counter)
    tokens_hit: Counter[Origin] = field(default_factory=Counter)
    evicted_pages: int = 0
    evicted_points: int = 0


class Cache:
    """`alpha` weighs work against recency where the policy is "flops"."""

    def __init__(self, spec: MemorySpec, arena: Arena, eviction: str, alpha: float = 1.0) -> None:
        self.spec = spec
        self.arena = arena
        self.trie = Trie()
        self.ghosts = Ghosts()
        self.tenants = Tenants()
        self.popularity = Popularity()
        self.counts = Counts()
        self.clock = 0
        # Half-lives since the beginning.
        self.warmth = 0.0
        self.points = 0
        # Prompts since a candidate was hit, or would have been.
        self.unproved = 0
        # Points kept per lookup, lately.
        self._kept_each = 1.0
        self._kept_before = 0
        # Position that each live slot was written for: a slot is read only by rows at that position.
        self.written_for: dict[int, int] = {}
        # What a resume point costs beyond the pages; 0: every node is one, for free.
        self.point_bytes = spec.state_bytes + spec.window_cells * spec.window_page_bytes
        self.page_bytes = spec.page_bytes
        self.cell = spec.cell
        self._point_of_slot: dict[int, ResumePoint] = {}
        self._by_value = eviction == "value"
        self._flops = Flops(alpha) if eviction == "flops" else None
        self._policy: Policy = self._flops or (by_value if self._by_value else by_recency)
        self._ranking = Ranking(self._score, self._evictable)

    # lookups --------------------------------------------------------------------------------------------------------

    def match(self, keys: list[Key], limit: int, plain: Key | None = None) -> Miss:
        cell = self.cell
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
        return self.ghosts.reason(keys, cached // self.cell, matched // self.cell)

    def looked_up(self, plain: Key | None, keys: list[Key], miss: Miss) -> None:
        """A lease was opened: the clock of recency goes on, and what was missed because it was evicted is learned."""
        self.clock += 1
        # A cache that holds much turns over slowly, and what is in it ages slowly.
        self._kept_each += (self.counts.captures_kept - self._kept_before - self._kept_each) / AVERAGED
        self._kept_before = self.counts.captures_kept
        turnover = self.points / self._kept_each
        self.warmth += 1 / max(SHORTEST_HALF_LIFE, turnover / HALF_LIVES_PER_TURNOVER)
        if plain is not None and keys:
            self.tenants.add(plain, keys[0])
        if self.point_bytes and miss.cached < miss.reusable:
            self._regret(keys, miss)

    def _regret(self, keys: list[Key], miss: Miss) -> None:
        key = self.ghosts.deepest_state(keys, miss.cached // self.cell, miss.reusable // self.cell)
        lost = self.ghosts.forget_state(key) if key is not None else None
        if lost is not None and lost.kind is not None and self.warmth - lost.warmth < REGRET:
            self.popularity.wanted(lost.kind)

    def seen(self, keys: list[Key], miss: Miss) -> int:
        """How much of a prompt is known to have been computed before, in tokens: there, or evicted not long ago."""
        reusable = miss.reusable // self.cell
        return self.cell * self.ghosts.seen(keys, miss.kv_matched // self.cell, reusable)

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
        self._hit(point)
        if point.slot is not None:
            self.arena.share(Kind.STATE, point.slot)
        for page in point.window:
            self.arena.share(Kind.WINDOW, page)
        return point.slot, point.window

    def _hit(self, point: ResumePoint) -> None:
        self.counts.hits[point.origin] += 1
        self.counts.tokens_hit[point.origin] += point.node.depth * self.cell
        self.popularity.wanted(self._class_of(point))
        point.hits += 1
        point.passes = 0
        point.uses = 1 + point.uses * 2.0 ** (point.warmth - self.warmth)
        point.used, point.warmth, point.inherited = self.clock, self.warmth, 0.0
        if point.origin is Origin.CANDIDATE:
            self.unproved = 0
            # It has proved to lie where prompts part.
            point.origin = Origin.JUNCTION
        self.popularity.entered(self._class_of(point))

    def passed(self, point: ResumePoint) -> None:
        """A sequence started further down the path."""
        if point.passes < MOST_PASSES:
            point.passes += 1
            self.popularity.entered(self._class_of(point))

    def _class_of(self, point: ResumePoint) -> int:
        return class_of(point.origin, point.hits, point.passes)

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
            self.ghosts.forget_cell(key)
            return self.trie.insert(key, parent, page, self.clock)
        node.used = self.clock
        if page is not None and page != node.page:
            self.arena.release(Kind.PAGE, page)
        return node

    def keep(self, key: Key, slot: int | None, window: tuple[int, ...]) -> None:
        """Make a node a resume point (unless it is one), as a further owner of its slot and window pages."""
        node = self.trie.nodes[key]
        if node.resume is not None:
            node.resume.used, node.resume.warmth = self.clock, self.warmth
            return
        if slot is not None:
            self.arena.share(Kind.STATE, slot)
        for page in window:
            self.arena.share(Kind.WINDOW, page)
        node.resume = ResumePoint(node, slot, window, self.clock, self.warmth)
        if slot is not None:
            self._point_of_slot[slot] = node.resume
        self.counts.captures_kept += 1
        self.points += 1
        self.ghosts.forget_state(key)

    def explain(self, key: Key, origin: Origin) -> None:
        """Why the node is a resume point. One that was only a candidate may turn out to be more."""
        point = self.trie.nodes[key].resume
        if point is None:
            return
        if not point.explained:
            point.explained, point.origin = True, origin
        elif not point.hits and _outranks(origin, point.origin):
            self.counts.kept[point.origin] -= 1
            point.origin = origin
        else:
            return
        self.counts.kept[origin] += 1
        self.popularity.entered(self._class_of(point))
        self._offer(point)

    def skipped(self, keys: list[Key], position: int) -> None:
        """There was no room for a snapshot: counted, and remembered as a reason."""
        self.counts.captures_skipped += 1
        depth = position // self.cell
        if depth <= len(keys):
            self.ghosts.add_state(keys[depth - 1], Lost(Reason.STATE_SKIPPED))

    # making room ----------------------------------------------------------------------------------------------------

    def take(self, kind: Kind, optional: bool = False) -> int | None:
        """A unit, if need be at the price of what is worth least."""
        return self._take(kind, None, OPTIONAL_EVICTION * self.arena.unit_bytes[kind] if optional else None)

    def take_for(self, origin: Origin, tokens: int, depth: int) -> int | None:
        """A slot for a snapshot that is worth what others like it are, if it can be had for what is worth less."""
        if origin is Origin.CANDIDATE:
            # Only of what nobody uses, and of older candidates.
            older = CHEAP + log2(max(1, tokens // self.cell)) + self.warmth
            return self._take(Kind.STATE, older, self.arena.unit_bytes[Kind.STATE])
        bound: float | None = None
        if self._by_value:
            chance = self.popularity.chance(class_of(origin, 0, 0))
            bound = by_value(Facts(tokens, depth, self.point_bytes, self.clock, self.warmth, 1.0, chance))
        return self._take(Kind.STATE, bound, OPTIONAL_EVICTION * self.arena.unit_bytes[Kind.STATE])

    def _take(self, kind: Kind, bound: float | None, most_bytes: int | None) -> int | None:
        unit = self.arena.take(kind)
        spent = 0
        while unit is None:
            if most_bytes is not None and spent >= most_bytes:
                return None
            victim = self._ranking.pop_below(bound)
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
        self.ghosts.add_cell(victim.key)
        if victim.parent:
            # Whoever used the cell used the one before it too.
            victim.parent.used = max(victim.parent.used, victim.used)
            self._offer(victim.parent)

    def _evict_point(self, point: ResumePoint) -> None:
        point.node.resume = None
        self.points -= 1
        if point.slot is not None:
            del self._point_of_slot[point.slot]
            self.release_slot(point.slot)
        for page in point.window:
            self.arena.release(Kind.WINDOW, page)
        self.counts.evicted_points += 1
        if self._flops:
            self._flops.evicted(self.clock - point.used)
        kind = None
        if point.origin is not Origin.CANDIDATE:
            kind = self._class_of(point)
            self._bequeath(point)
        self.ghosts.add_state(point.node.key, Lost(Reason.STATE_EVICTED, kind, point.warmth))
        self._offer(point.node)

    def _bequeath(self, point: ResumePoint) -> None:
        """Who would have started at a point will start at the one above it."""
        above = resume_at_or_above(point.node.parent)
        if above is None:
            return
        wants = self.popularity.chance(self._class_of(point)) * point.uses + point.inherited
        latest = max(above.warmth, point.warmth)
        aged = 2.0 ** (above.warmth - latest)
        above.uses *= aged
        above.inherited = above.inherited * aged + wants * 2.0 ** (point.warmth - latest)
        above.warmth = latest

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
        return self.page_bytes

    def _score(self, candidate: Candidate) -> float:
        if isinstance(candidate, ResumePoint):
            return self._score_point(candidate)
        if self.point_bytes and self._by_value:
            # Nobody can start from such a leaf.
            return WORTHLESS + candidate.used
        return self._policy(self._leaf_facts(candidate))

    def _leaf_facts(self, leaf: Node) -> Facts:
        # A leaf without a resume point can be no one's start: it only shows where sequences part.
        tokens = self.cell // 2 if self.point_bytes else self.cell
        warmth = leaf.used / SHORTEST_HALF_LIFE
        return Facts(tokens, leaf.depth * self.cell, self.page_bytes or self.point_bytes, leaf.used, warmth)

    def _score_point(self, point: ResumePoint) -> float:
        cells, pages = self._reach(point.node)
        tokens, depth, size = (
            cells * self.cell,
            point.node.depth * self.cell,
            self.point_bytes + pages * self.page_bytes,
        )
        if not self._by_value:
            return self._policy(Facts(tokens, depth, size, point.used))
        if point.origin is Origin.CANDIDATE:
            # Whatever else is there is worth more; of these, those that lie close together go first.
            return CHEAP + log2(cells) + point.warmth
        chance = self.popularity.chance(self._class_of(point))
        return by_value(Facts(tokens, depth, size, point.used, point.warmth, point.uses, chance, point.inherited))

    def _reach(self, node: Node) -> tuple[int, int]:
        """Cells between a resume point and the one above it; and how many of their pages only it keeps of use."""
        cells, pages, own = 1, 1, node.children == 0
        above = node.parent
        while above is not None and above.resume is None:
            cells += 1
            own = own and above.children == 1 and not above.pins
            pages += own
            above = above.parent
        return cells, pages if node.children == 0 else 0


def _outranks(reason: Origin, other: Origin) -> bool:
    """Does a later reason tell more? Any tells more than none; and where a sequence ended, the next turn goes on."""
    if other is Origin.CANDIDATE:
        return reason is not Origin.CANDIDATE
    return reason is Origin.ANSWER_END and other in (Origin.PROMPT_END, Origin.REGULAR)
