"""Values everything that could be evicted, and finds the least valuable.

Frees nothing; the cache calls it and acts. Policies are in `eviction.py`, statistics of states in `popularity.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from weft.memory.arena import Arena
from weft.memory.captures import Origin
from weft.memory.eviction import Candidate, CandidateFacts, Flops, Policy, Ranking, by_recency, by_value, cheap
from weft.memory.kinds import Kind
from weft.memory.popularity import AGES, Popularity, age_bucket, class_of
from weft.memory.spec import MemorySpec
from weft.memory.tidy_heap import TidyHeap
from weft.memory.trie import Node, ResumePoint, Trie, resume_at_or_above

# Maximum number of points ranked again between two lookups because of their age.
MOST_RANKED_ANEW = 128


class Valuation:
    """`alpha` weighs work against recency for the policy "flops". `clock` counts lookups."""

    def __init__(self, spec: MemorySpec, arena: Arena, trie: Trie, eviction: str, alpha: float) -> None:
        self.clock = 0
        self.popularity = Popularity()
        self.by_value = eviction == "value"
        # Cost of a resume point beyond the pages; 0: every node is one, for free.
        self.point_bytes = spec.state_bytes + spec.window_cells * spec.window_page_bytes
        self.page_bytes = spec.page_bytes
        self._cell = spec.cell
        self._nodes = trie.nodes
        self._owners = arena.owners
        self._flops = Flops(alpha) if eviction == "flops" else None
        self._policy: Policy = self._flops or by_recency
        self._ranking = Ranking(self.score, self._evictable)
        # Leaves from which no sequence can start, least recently used first. Other policies rank them like everything
        # else.
        self._useless: OrderedDict[Node, None] = OrderedDict()
        self._knows_useless = self.by_value and self.point_bytes > 0
        # Resume points of requests that wait for memory, as of the last plan.
        self._awaited: set[ResumePoint] = set()
        # Candidates that go next, because a tier below has them or they are not worth a copy, and their bytes.
        self._staged: deque[tuple[Candidate, int]] = deque()
        self.staged_bytes = 0
        # When points reach an age with another probability. While memory is free, their rank does not matter, so they
        # are ranked again when something must be evicted: a bounded number of them after each lookup.
        self._aging: TidyHeap[tuple[int, int, ResumePoint]] = TidyHeap(_aging)
        self._ages_noted = 0
        self._aged_at = 0

    # time -----------------------------------------------------------------------------------------------------------

    def looked_up(self) -> None:
        self.clock += 1
        if self.by_value:
            self.popularity.looked_up()

    def use(self, point: ResumePoint) -> None:
        """Record that a point is new, wanted, or computed again."""
        point.used = self.clock
        if self.by_value:
            self._await_age(point, self.clock + 1)

    def _await_age(self, point: ResumePoint, due: int) -> None:
        if point.due != due:
            point.due = due
            self._ages_noted += 1
            self._aging.push((due, self._ages_noted, point))

    def _rank_anew(self) -> None:
        """Rank points again that have reached an age with another probability since something was evicted last."""
        left = MOST_RANKED_ANEW * min(1, self.clock - self._aged_at)
        self._aged_at = self.clock
        while left and (first := self._aging.first()) is not None and first[0] <= self.clock:
            entry = _aging(self._aging.pop())
            if entry is None:
                continue
            left -= 1
            point, age = entry[2], self.clock - entry[2].used
            self.offer(point)
            if age < AGES[-1]:
                self._await_age(point, point.used + AGES[age_bucket(age) + 1])

    def expect(self, points: set[ResumePoint]) -> None:
        """Protect points from which waiting requests will start next: for these, nothing has to be learned."""
        if not self.by_value or points == self._awaited:
            return
        no_longer, self._awaited = self._awaited - points, points
        for point in no_longer:
            self.offer(point)

    # candidates -----------------------------------------------------------------------------------------------------

    def offer(self, candidate: Candidate) -> None:
        """Rank a candidate (again), if it can be evicted: call this when that or its value has changed."""
        if not self._evictable(candidate):
            return
        if self._knows_useless and isinstance(candidate, Node):
            self._useless[candidate] = None
        else:
            self._ranking.offer(candidate)

    def offer_shortened(self, end: Node) -> None:
        """Rank the new end of a path that lost its last cell; without a point to start from, it is evicted next."""
        if end.resume is not None:
            if not end.children:
                # Now only this point keeps the path's pages useful.
                self.offer(end.resume)
        elif self._knows_useless:
            if self._evictable(end):
                self._useless[end] = None
                self._useless.move_to_end(end, last=False)
        else:
            self.offer(end)

    def pop_least(self, bound: float | None = None) -> Candidate | None:
        """Remove and return the least valuable candidate, if its value is below the bound."""
        useless = self.pop_useless()
        if useless is not None:
            return useless
        self._rank_anew()
        return self._pop_staged(bound) or self._ranking.pop_below(bound)

    def _pop_staged(self, bound: float | None) -> Candidate | None:
        while self._staged:
            candidate, size = self._staged[0]
            if candidate.stamp == 0 and self._evictable(candidate):
                # Scores below zero are those of states that nothing has wanted: they go first.
                cheap = self._ranking.pop_below(0.0 if bound is None else min(0.0, bound))
                if cheap is not None:
                    return cheap
                if bound is not None and self.score(candidate) >= bound:
                    return None
            self._staged.popleft()
            self.staged_bytes -= size
            if candidate.stamp == 0 and self._evictable(candidate):
                return candidate
        return None

    def pop_next(self) -> Candidate | None:
        """Remove and return the candidate that would be evicted next, so that it can be copied before."""
        self._rank_anew()
        return self._ranking.pop()

    def stage(self, candidate: Candidate) -> None:
        """Let a candidate be evicted next. If it is used before, it is ranked again like any other."""
        if self._evictable(candidate):
            candidate.stamp = 0
            size = self.reach_bytes(candidate)
            self._staged.append((candidate, size))
            self.staged_bytes += size

    def reach_tokens(self, point: ResumePoint) -> int:
        """Return the tokens that a point saves, compared with the one above it."""
        return _reach(point.node)[0] * self._cell

    def reach_bytes(self, candidate: Candidate) -> int:
        """Return the bytes that become free when a candidate and the pages that only it keeps useful are evicted."""
        if isinstance(candidate, ResumePoint):
            return self.point_bytes + _reach(candidate.node)[1] * self.page_bytes
        cells, above = 1, candidate.parent
        while above is not None and above.children == 1 and not above.pins and above.resume is None:
            cells, above = cells + 1, above.parent
        return cells * self.page_bytes

    def pop_useless(self) -> Node | None:
        while self._useless:
            leaf, _ = self._useless.popitem(last=False)
            if self._evictable(leaf):
                return leaf
        return None

    def _evictable(self, candidate: Candidate) -> bool:
        if isinstance(candidate, ResumePoint):
            if candidate.node.resume is not candidate or candidate.retained:
                return False
            return candidate.slot is None or self._owners[Kind.STATE][candidate.slot] == 1
        leaf = candidate.children == 0 and candidate.pins == 0 and candidate.resume is None
        return leaf and self._nodes.get(candidate.key) is candidate

    def gone(self, point: ResumePoint) -> None:
        """Record the eviction of a point. Requests for it will start at the one above."""
        if self._flops:
            self._flops.evicted(self.clock - point.used)
        above = resume_at_or_above(point.node.parent)
        if above is None or point.origin is Origin.CANDIDATE:
            return
        wanting = [(point.kind, point.used), point.heir_of, above.heir_of]
        # It is worth more now; eviction will notice when it reaches the top.
        above.heir_of = max((each for each in wanting if each), key=lambda each: self._rate(*each))

    # values ---------------------------------------------------------------------------------------------------------

    def bytes_of(self, candidate: Candidate) -> int:
        return self.point_bytes if isinstance(candidate, ResumePoint) else self.page_bytes

    def of_new(self, origin: Origin, tokens: int) -> float:
        """Return the value of a point that would be kept for this reason and save this many tokens."""
        value = by_value(self.popularity.rate(class_of(origin, 0, 0), 0), tokens, self.point_bytes)
        return cheap(value) if origin is Origin.CANDIDATE else value

    def score(self, candidate: Candidate) -> float:
        if isinstance(candidate, ResumePoint):
            return self._score_point(candidate)
        return self._policy(self._leaf_facts(candidate))

    def _leaf_facts(self, leaf: Node) -> CandidateFacts:
        # No sequence can start at a leaf without a resume point: it only shows where sequences diverge.
        tokens = self._cell // 2 if self.point_bytes else self._cell
        return CandidateFacts(tokens, leaf.depth * self._cell, self.page_bytes or self.point_bytes, leaf.used)

    def _score_point(self, point: ResumePoint) -> float:
        cells, pages = _reach(point.node)
        tokens, size = cells * self._cell, self.point_bytes + pages * self.page_bytes
        if not self.by_value:
            return self._policy(CandidateFacts(tokens, point.node.depth * self._cell, size, point.used))
        if point in self._awaited:
            return by_value(1.0, tokens, size)
        rate = self.popularity.rate(point.kind, self.clock - point.used)
        if point.origin is Origin.CANDIDATE:
            # Everything else is worth more; of these, those that lie close together go first.
            return cheap(by_value(rate, tokens, self.point_bytes))
        if point.heir_of is not None:
            rate += self._rate(*point.heir_of)
        return by_value(rate, tokens, size)

    def _rate(self, kind: int, used: int) -> float:
        return self.popularity.rate(kind, self.clock - used)


def _aging(entry: tuple[int, int, ResumePoint]) -> tuple[int, int, ResumePoint] | None:
    """Return an entry of points that reach an age, unless the point is gone or was used since."""
    due, _, point = entry
    return entry if point.due == due and point.node.resume is point else None


def _reach(node: Node) -> tuple[int, int]:
    """Return the cells between a resume point and the one above, and how many of their pages only it keeps useful."""
    cells, pages, own = 1, 1, node.children == 0
    above = node.parent
    while above is not None and above.resume is None:
        cells += 1
        own = own and above.children == 1 and not above.pins
        pages += own
        above = above.parent
    return cells, pages if node.children == 0 else 0
