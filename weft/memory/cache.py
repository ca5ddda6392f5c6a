"""Everything kept beyond the sequences that computed it: trie, resume points, and eviction for new entries.

The ledger's other half: it knows no leases, only pins and owners. `valuation.py` ranks what to evict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.base.grid import floor_to_grid
from weft.memory.arena import Arena
from weft.memory.captures import Origin
from weft.memory.eviction import Candidate
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.misses import Ghosts, Lost, Miss, Reason, Tenants
from weft.memory.popularity import MOST_PASSES, class_of
from weft.memory.spec import MemorySpec
from weft.memory.trie import Node, ResumePoint, Trie, resume_at_or_above
from weft.memory.valuation import Valuation

# An optional snapshot may evict at most this many times its own bytes.
OPTIONAL_EVICTION = 2


@dataclass(slots=True)
class Counts:
    """Event counts for metrics."""

    lookups: int = 0
    tokens_asked: int = 0
    tokens_cached: int = 0
    tokens_resumed: int = 0  # by sequences that returned after a preemption
    misses: Counter[Reason] = field(default_factory=Counter)
    tokens_lost: Counter[Reason] = field(default_factory=Counter)
    captures_kept: int = 0
    captures_skipped: int = 0
    kept: Counter[Origin] = field(default_factory=Counter)  # by their current or last reason
    candidates: int = 0  # total written as candidates
    candidates_held: int = 0
    hits: Counter[Origin] = field(default_factory=Counter)
    tokens_hit: Counter[Origin] = field(default_factory=Counter)
    evicted_pages: int = 0
    evicted_points: int = 0


class Cache:
    """`alpha` weighs work against recency for the policy "flops"."""

    def __init__(self, spec: MemorySpec, arena: Arena, eviction: str, alpha: float = 1.0) -> None:
        self.spec = spec
        self.arena = arena
        self.trie = Trie()
        self.ghosts = Ghosts()
        self.tenants = Tenants()
        self.valuation = Valuation(spec, arena, self.trie, eviction, alpha)
        self.counts = Counts()
        self.points = 0
        self.taken_bytes = 0  # in all
        # Prompts since a candidate was hit, or would have been.
        self.unproved = 0
        # The position that each live slot was written for: only rows at that position read the slot.
        self.written_for: dict[int, int] = {}
        self.point_bytes = self.valuation.point_bytes
        self.cell = spec.cell
        # Called when a cell or its resume point appears or disappears: key, position, whether it is held, whether a
        # sequence can start there.
        self.watch: Callable[[Key, int, bool, bool], None] | None = None
        self._point_of_slot: dict[int, ResumePoint] = {}

    @property
    def clock(self) -> int:
        """Number of lookups so far, the unit of recency."""
        return self.valuation.clock

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
        """Record the lookup of an opened lease: advance the clock, and learn from what was missed after an eviction."""
        self.valuation.looked_up()
        if plain is not None and keys:
            self.tenants.add(plain, keys[0])
        if self.point_bytes and miss.cached < miss.reusable:
            self._regret(keys, miss)

    def _regret(self, keys: list[Key], miss: Miss) -> None:
        key = self.lost_state(keys, miss)
        lost = self.ghosts.forget_state(key) if key is not None else None
        if lost is not None and lost.kind is not None:
            self.valuation.popularity.wanted(lost.kind, self.clock - lost.used)

    def lost_state(self, keys: list[Key], miss: Miss) -> Key | None:
        """Return the cell of the state that a lookup would have started from, if it was evicted."""
        return self.ghosts.deepest_state(keys, miss.cached // self.cell, miss.reusable // self.cell)

    def seen(self, keys: list[Key], miss: Miss) -> int:
        """Return how much of a prompt is known to have been computed before, in tokens: cached, or recently evicted."""
        reusable = miss.reusable // self.cell
        return self.cell * self.ghosts.seen(keys, miss.kv_matched // self.cell, reusable)

    def count(self, miss: Miss, again: bool) -> None:
        """Count a started request; `again` if it was preempted before, which says nothing about the cache."""
        if again:
            self.counts.tokens_resumed += miss.cached
            return
        self.counts.lookups += 1
        self.counts.tokens_asked += miss.reusable
        self.counts.tokens_cached += miss.cached
        self.counts.misses[miss.reason] += 1
        self.counts.tokens_lost[miss.reason] += miss.tokens_lost

    def changed(self, node: Node, held: bool, point: bool) -> None:
        """Report that a cell or its resume point appeared or disappeared."""
        if self.watch is not None:
            self.watch(node.key, node.depth * self.cell, held, point)

    # pins -----------------------------------------------------------------------------------------------------------

    def pin(self, node: Node) -> tuple[int | None, tuple[int, ...]]:
        """Protect the path to a node, and return an ownership of its checkpoint and window pages."""
        self.trie.pin(node)
        point = node.resume
        if point is None:
            assert not self.point_bytes
            return None, ()
        if point.slot is not None:
            self.arena.share(Kind.STATE, point.slot)
        for page in point.window:
            self.arena.share(Kind.WINDOW, page)
        return point.slot, point.window

    def started(self, node: Node, stands_in: bool = False) -> None:
        """Record that a sequence starts from a node, and not from those above it."""
        above = node.parent
        while above is not None:
            if above.resume is not None:
                self._passed(above.resume)
            above = above.parent
        node.hits += 1
        node.used = self.clock
        if node.resume is not None:
            self._hit(node.resume, stands_in)

    def _hit(self, point: ResumePoint, stands_in: bool) -> None:
        """Count a hit. A point that stands in for an evicted one shows that the other was wanted, not itself."""
        self.counts.hits[point.origin] += 1
        self.counts.tokens_hit[point.origin] += point.node.depth * self.cell
        if stands_in:
            point.heir_of = None
            self.valuation.use(point)
            return
        self.valuation.popularity.wanted(point.kind, self.clock - point.used)
        point.hits += 1
        point.passes = 0
        point.heir_of = None
        self.valuation.use(point)
        if point.origin is Origin.CANDIDATE:
            self.unproved = 0
        if point.origin in (Origin.CANDIDATE, Origin.RECALLED):
            # It has proved to lie where prompts diverge.
            self._change_origin(point, Origin.JUNCTION)
        self._classify(point)

    def _passed(self, point: ResumePoint) -> None:
        if point.passes < MOST_PASSES:
            point.passes += 1
            self._classify(point)

    def _classify(self, point: ResumePoint) -> None:
        point.kind = class_of(point.origin, point.hits, point.passes)
        self.valuation.popularity.entered(point.kind, self.clock - point.used)

    def unpin(self, node: Node | None) -> None:
        if node is None:
            return
        self.trie.unpin(node)
        node.used = self.clock
        self.valuation.offer(node)

    def release_slot(self, slot: int | None) -> None:
        if slot is None:
            return
        self.arena.release(Kind.STATE, slot)
        if slot not in self.arena.owners[Kind.STATE]:
            self.written_for.pop(slot, None)
        elif slot in self._point_of_slot:
            self.valuation.offer(self._point_of_slot[slot])

    # adding entries -------------------------------------------------------------------------------------------------

    def publish(self, key: Key, parent: Node | None, page: int | None) -> Node:
        """Add a computed cell; take over its page, or release the page if the cell is already cached."""
        node = self.trie.nodes.get(key)
        if node is None:
            self.ghosts.forget_cell(key)
            node = self.trie.insert(key, parent, page, self.clock)
            self.changed(node, held=True, point=not self.point_bytes)
            return node
        node.used = self.clock
        if page is not None and page != node.page:
            self.arena.release(Kind.PAGE, page)
        return node

    def keep(self, key: Key, slot: int | None, window: tuple[int, ...]) -> None:
        """Make a node a resume point (unless it is one), as a further owner of its slot and window pages."""
        node = self.trie.nodes[key]
        if node.resume is not None:
            self.valuation.use(node.resume)
            return
        if slot is not None:
            self.arena.share(Kind.STATE, slot)
        for page in window:
            self.arena.share(Kind.WINDOW, page)
        node.resume = ResumePoint(node, slot, window, self.clock)
        self.valuation.use(node.resume)
        if slot is not None:
            self._point_of_slot[slot] = node.resume
        self.counts.captures_kept += 1
        self.points += 1
        self.ghosts.forget_state(key)
        self.changed(node, held=True, point=True)

    def explain(self, key: Key, origin: Origin) -> None:
        """Set why the node is a resume point. A candidate may turn out to be more."""
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
        self.valuation.offer(point)

    def _change_origin(self, point: ResumePoint, origin: Origin) -> None:
        self.counts.kept[point.origin] -= 1
        self.counts.kept[origin] += 1
        self.counts.candidates_held -= point.origin is Origin.CANDIDATE
        point.origin = origin

    def inherit(self, key: Key, hits: int) -> None:
        """Let a copied resume point count the hits that it had in the tier that it comes from."""
        point = self.trie.nodes[key].resume
        if point is not None and hits > point.hits:
            point.hits = hits
            self._classify(point)

    def replace_page(self, node: Node, page: int | None) -> None:
        """Give a cell another page with the same contents."""
        if node.page is not None and page is not None:
            self.arena.release(Kind.PAGE, node.page)
            node.page = page

    def skipped(self, keys: list[Key], position: int) -> None:
        """Record that there was no room for a snapshot: counted, and remembered as a reason."""
        self.counts.captures_skipped += 1
        depth = position // self.cell
        if depth <= len(keys):
            self.ghosts.add_state(keys[depth - 1], Lost(Reason.STATE_SKIPPED))

    # eviction -------------------------------------------------------------------------------------------------------

    def take(self, kind: Kind, optional: bool = False) -> int | None:
        """Return a unit, evicting the least valuable entries if necessary."""
        return self._take(kind, None, OPTIONAL_EVICTION * self.arena.unit_bytes[kind] if optional else None)

    def take_below(self, kind: Kind, value: float | None) -> int | None:
        """Return a unit, evicting only entries that are worth less than `value`; None: any."""
        return self._take(kind, value, None)

    def take_for(self, origin: Origin, tokens: int) -> int | None:
        """Return a slot for a snapshot worth as much as similar ones, if evicting less valuable entries suffices."""
        value, size = self.valuation.of_new(origin, tokens), self.arena.unit_bytes[Kind.STATE]
        if origin is Origin.CANDIDATE:
            # Only from unused memory and older candidates.
            return self._take(Kind.STATE, value, size)
        return self._take(Kind.STATE, value if self.valuation.by_value else None, OPTIONAL_EVICTION * size)

    def _take(self, kind: Kind, bound: float | None, most_bytes: int | None) -> int | None:
        unit = self.arena.take(kind)
        self.taken_bytes += self.arena.unit_bytes[kind]
        spent = 0
        while unit is None:
            if most_bytes is not None and spent >= most_bytes:
                return None
            victim = self.valuation.pop_least(bound)
            if victim is None:
                return None
            spent += self.valuation.bytes_of(victim)
            self._evict(victim)
            unit = self.arena.take(kind)
        return unit

    def clear(self) -> None:
        """Drop everything that no running sequence uses."""
        while (victim := self.valuation.pop_least()) is not None:
            self._evict(victim)
        self.ghosts.clear()

    def drop_point(self, node: Node) -> None:
        """Drop the resume point of a cell. Its units stay with their other owners."""
        if node.resume is not None:
            self._evict_point(node.resume)

    def drop_end(self, end: Node, depth: int) -> list[Key]:
        """Drop the end of a path, from the cell of this depth on, as far as nothing else needs it; return its keys."""
        dropped: list[Key] = []
        above: Node | None = end
        while above is not None and above.depth >= depth and self.drop_cell(above):
            dropped.append(above.key)
            above = above.parent
        return dropped

    def drop_cell(self, node: Node) -> bool:
        """Drop the resume point of a cell, and the cell itself unless it is in use; return whether it was dropped."""
        self.drop_point(node)
        if node.children or node.pins:
            return False
        self._evict(node)
        return True

    def _evict(self, victim: Candidate) -> None:
        if isinstance(victim, ResumePoint):
            self._evict_point(victim)
            return
        self.trie.cut(victim)
        self.changed(victim, held=False, point=not self.point_bytes)
        if victim.page is not None:
            self.arena.release(Kind.PAGE, victim.page)
        self.counts.evicted_pages += 1
        self.ghosts.add_cell(victim.key)
        if victim.parent:
            # A use of the cell was also a use of the one before it.
            victim.parent.used = max(victim.parent.used, victim.used)
            self.valuation.offer_shortened(victim.parent)

    def _evict_point(self, point: ResumePoint) -> None:
        point.node.resume = None
        self.points -= 1
        self.changed(point.node, held=False, point=True)
        if point.slot is not None:
            del self._point_of_slot[point.slot]
            self.release_slot(point.slot)
        for page in point.window:
            self.arena.release(Kind.WINDOW, page)
        self.counts.evicted_points += 1
        self.counts.candidates_held -= point.origin is Origin.CANDIDATE and point.explained
        self.valuation.gone(point)
        self.ghosts.add_state(point.node.key, Lost(Reason.STATE_EVICTED, point.kind, point.used))
        self.valuation.offer(point.node)


def _outranks(reason: Origin, other: Origin) -> bool:
    """Return whether a later reason is more informative: any is more than none, and the next turn resumes at an end."""
    if other is Origin.CANDIDATE:
        return reason is not Origin.CANDIDATE
    return reason is Origin.ANSWER_END and other in (Origin.PROMPT_END, Origin.REGULAR)
