"""What is remembered beyond the sequences that computed it: trie, resume points, and what must go for new things.

The ledger's other half: it knows no leases, only pins and owners.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from weft.base.grid import floor_to_grid
from weft.memory.arena import Arena
from weft.memory.captures import Origin
from weft.memory.eviction import (
    Candidate,
    Facts,
    Flops,
    Policy,
    Ranking,
    by_recency,
    by_value,
    cheap,
)
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.misses import Ghosts, Lost, Miss, Reason, Tenants
from weft.memory.popularity import AGES, MOST_PASSES, Popularity, class_of
from weft.memory.spec import MemorySpec
from weft.memory.trie import Node, ResumePoint, Trie, resume_at_or_above

# An optional snapshot may push out at most this many times its own bytes.
OPTIONAL_EVICTION = 2
# How many points may be ranked anew in a lookup because they have come of age.
MOST_RANKED_ANEW = 512


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
    kept: Counter[Origin] = field(default_factory=Counter)  # by the reason they have now, or had at last
    candidates: int = 0  # ever written as such
    candidates_held: int = 0
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
        self.points = 0
        # Prompts since a candidate was hit, or would have been.
        self.unproved = 0
        # Position that each live slot was written for: a slot is read only by rows at that position.
        self.written_for: dict[int, int] = {}
        # What a resume point costs beyond the pages; 0: every node is one, for free.
        self.point_bytes = spec.state_bytes + spec.window_cells * spec.window_page_bytes
        self.page_bytes = spec.page_bytes
        self.cell = spec.cell
        self._point_of_slot: dict[int, ResumePoint] = {}
        self._by_value = eviction == "value"
        self._flops = Flops(alpha) if eviction == "flops" else None
        self._policy: Policy = self._flops or by_recency
        self._ranking = Ranking(self._score, self._evictable)
        # Leaves that nobody can start from, longest in disuse first. Other policies rank them like everything else.
        self._useless: OrderedDict[Node, None] = OrderedDict()
        self._knows_useless = self._by_value and self.point_bytes > 0
        # Points and their last use, by the age that they come to next.
        self._coming_of_age: list[deque[tuple[int, ResumePoint]]] = [deque() for _ in AGES]

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
        if self._by_value:
            self.popularity.looked_up()
            self._rank_anew()
        if plain is not None and keys:
            self.tenants.add(plain, keys[0])
        if self.point_bytes and miss.cached < miss.reusable:
            self._regret(keys, miss)

    def _regret(self, keys: list[Key], miss: Miss) -> None:
        key = self.ghosts.deepest_state(keys, miss.cached // self.cell, miss.reusable // self.cell)
        lost = self.ghosts.forget_state(key) if key is not None else None
        if lost is not None and lost.kind is not None:
            self.popularity.wanted(lost.kind, self.clock - lost.used)

    def _rank_anew(self) -> None:
        """Points whose last use is so long ago that their chances are others now."""
        left = MOST_RANKED_ANEW
        for bucket, (age, due) in enumerate(zip(AGES, self._coming_of_age, strict=True)):
            while due and left and due[0][0] + age <= self.clock:
                used, point = due.popleft()
                if point.used == used and point.node.resume is point:
                    left -= 1
                    self._offer(point)
                    self._await_age(point, bucket + 1)

    def _await_age(self, point: ResumePoint, bucket: int = 1) -> None:
        if self._by_value and bucket < len(AGES):
            self._coming_of_age[bucket].append((point.used, point))

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
        self.popularity.wanted(point.kind, self.clock - point.used)
        point.hits += 1
        point.passes = 0
        point.used, point.heir_of = self.clock, None
        self._await_age(point)
        if point.origin is Origin.CANDIDATE:
            self.unproved = 0
        if point.origin in (Origin.CANDIDATE, Origin.RECALLED):
            # It has proved to lie where prompts part.
            self._change_origin(point, Origin.JUNCTION)
        self._classify(point)

    def passed(self, point: ResumePoint) -> None:
        """A sequence started further down the path."""
        if point.passes < MOST_PASSES:
            point.passes += 1
            self._classify(point)

    def _classify(self, point: ResumePoint) -> None:
        point.kind = class_of(point.origin, point.hits, point.passes)
        self.popularity.entered(point.kind, self.clock - point.used)

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
            node.resume.used = self.clock
            self._await_age(node.resume)
            return
        if slot is not None:
            self.arena.share(Kind.STATE, slot)
        for page in window:
            self.arena.share(Kind.WINDOW, page)
        node.resume = ResumePoint(node, slot, window, self.clock)
        self._await_age(node.resume)
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
            self.counts.kept[origin] += 1
            self.counts.candidates += origin is Origin.CANDIDATE
            self.counts.candidates_held += origin is Origin.CANDIDATE
        elif not point.hits and _outranks(origin, point.origin):
            self._change_origin(point, origin)
        else:
            return
        self._classify(point)
        self._offer(point)

    def _change_origin(self, point: ResumePoint, origin: Origin) -> None:
        self.counts.kept[point.origin] -= 1
        self.counts.kept[origin] += 1
        self.counts.candidates_held -= point.origin is Origin.CANDIDATE
        point.origin = origin

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

    def take_for(self, origin: Origin, tokens: int) -> int | None:
        """A slot for a snapshot that is worth what others like it are, if it can be had for what is worth less."""
        value = by_value(self.popularity.rate(class_of(origin, 0, 0), 0), tokens, self.point_bytes)
        if origin is Origin.CANDIDATE:
            # Only of what nobody uses, and of older candidates.
            return self._take(Kind.STATE, cheap(value), self.arena.unit_bytes[Kind.STATE])
        bound = value if self._by_value else None
        return self._take(Kind.STATE, bound, OPTIONAL_EVICTION * self.arena.unit_bytes[Kind.STATE])

    def _take(self, kind: Kind, bound: float | None, most_bytes: int | None) -> int | None:
        unit = self.arena.take(kind)
        spent = 0
        while unit is None:
            if most_bytes is not None and spent >= most_bytes:
                return None
            victim = self._first_useless() or self._ranking.pop_below(bound)
            if victim is None:
                return None
            spent += self._bytes(victim)
            self._evict(victim)
            unit = self.arena.take(kind)
        return unit

    def clear(self) -> None:
        """Forget everything that no running sequence uses."""
        while (victim := self._first_useless() or self._ranking.pop()) is not None:
            self._evict(victim)
        self.ghosts.clear()

    def _first_useless(self) -> Node | None:
        while self._useless:
            leaf, _ = self._useless.popitem(last=False)
            if self._evictable(leaf):
                return leaf
        return None

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
            self._shorten(victim.parent, victim.used)

    def _shorten(self, parent: Node, used: int) -> None:
        """A path lost its last cell."""
        # Whoever used the cell used the one before it too.
        parent.used = max(parent.used, used)
        if parent.resume is not None:
            if not parent.children:
                # From now on it is all that keeps the path's pages of use.
                self._offer(parent.resume)
        elif self._knows_useless:
            if self._evictable(parent):
                self._useless[parent] = None
                self._useless.move_to_end(parent, last=False)
        else:
            self._offer(parent)

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
        if point.origin is not Origin.CANDIDATE:
            self._bequeath(point)
        elif point.explained:
            self.counts.candidates_held -= 1
        self.ghosts.add_state(point.node.key, Lost(Reason.STATE_EVICTED, point.kind, point.used))
        self._offer(point.node)

    def _bequeath(self, point: ResumePoint) -> None:
        """Who would have started at a point will start at the one above it."""
        above = resume_at_or_above(point.node.parent)
        if above is None:
            return
        wanting = [(point.kind, point.used), point.heir_of, above.heir_of]
        # It is worth more now: whoever would evict it will notice.
        above.heir_of = max((each for each in wanting if each), key=lambda each: self._rate(*each))

    def _rate(self, kind: int, used: int) -> float:
        return self.popularity.rate(kind, self.clock - used)

    def _offer(self, candidate: Candidate) -> None:
        if not self._evictable(candidate):
            return
        if self._knows_useless and isinstance(candidate, Node):
            self._useless[candidate] = None
        else:
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
        return self._policy(self._leaf_facts(candidate))

    def _leaf_facts(self, leaf: Node) -> Facts:
        # A leaf without a resume point can be no one's start: it only shows where sequences part.
        tokens = self.cell // 2 if self.point_bytes else self.cell
        return Facts(tokens, leaf.depth * self.cell, self.page_bytes or self.point_bytes, leaf.used)

    def _score_point(self, point: ResumePoint) -> float:
        cells, pages = self._reach(point.node)
        tokens, size = cells * self.cell, self.point_bytes + pages * self.page_bytes
        if not self._by_value:
            return self._policy(Facts(tokens, point.node.depth * self.cell, size, point.used))
        rate = self.popularity.rate(point.kind, self.clock - point.used)
        if point.origin is Origin.CANDIDATE:
            # Whatever else is there is worth more; of these, those that lie close together go first.
            return cheap(by_value(rate, tokens, self.point_bytes))
        if point.heir_of is not None:
            rate += self._rate(*point.heir_of)
        return by_value(rate, tokens, size)

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
