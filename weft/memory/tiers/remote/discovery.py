"""Finds out what a remote store has of a prompt, by asking for a few objects at a time, beside the steps.

A store has no index that an engine could read, and other engines change it. So a request that waits asks for the
objects of its own path. What is found is entered into the engine's view of the store, where lookups find it like
anything in a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from time import monotonic
from typing import Any

from weft.base.grid import first_window_cell
from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.remote.store import NAMES_PER_DROP, GuardedStore, StoreFailed
from weft.memory.tiers.remote.stored_names import names_below
from weft.memory.tiers.remote.tier import ObjectNames
from weft.memory.tiers.units import PointCopy, PointUnits, hand_over, release_point, take, take_point
from weft.memory.trie import Node

ASKERS = 16
# Objects of one path that are asked for at once, and how often.
PER_ROUND, MOST_ROUNDS = 16, 12
# A request waits this long for answers, then it starts without them.
PATIENCE_SECONDS = 0.5
# Paths that are searched at once; further requests start without asking.
MOST_SEARCHES = 64


class PathSearch:
    """Where a path ends in a store: how deep its pages reach, then the deepest resume point at or above.

    Paths are stored from the root down, so a few pages say where they end. Depths are in cells; up to `least` they are
    of no use. Without `pointed`, a sequence can resume at every cell.

        [0, found] is in the store   (found, open] is not known yet   (open, ...) is not in the store

    Most prompts are new: one object shows it.
    """

    def __init__(self, cells: int, least: int, pointed: bool) -> None:
        self.found = least
        self.open = cells
        self.least = least
        self.pointed = pointed
        self.rounds = 0
        self.result: int | None = None

    @property
    def of_points(self) -> bool:
        """Whether points are asked for, not pages."""
        return self.pointed and self.found == self.open

    def next_round(self) -> list[int]:
        """Return the depths to ask for; none if the search has ended."""
        if self.result is not None:
            return []
        self.rounds += 1
        if self.open <= self.least or self.rounds > MOST_ROUNDS:
            self.result = 0
            return []
        if self.of_points:
            return list(range(self.open, max(self.least, self.open - PER_ROUND), -1))
        if self.found == self.least:
            return [self.found + 1]
        span = self.open - self.found
        parts = min(PER_ROUND, span)
        return [self.found + -(-span * part // parts) for part in range(1, parts + 1)]

    def answered(self, depths: Sequence[int], present: set[int]) -> None:
        """Take the answers of a round."""
        if self.of_points:
            if present:
                self.result = max(present)
            else:
                self.found = self.open = min(depths) - 1
            return
        self.found = max(present, default=self.found)
        self.open = min((depth for depth in depths if depth > self.found), default=self.open + 1) - 1
        if self.found == self.open and not self.pointed:
            self.result = self.found if self.found > self.least else 0


class Search:
    """The search of one request, and the answers that are under way."""

    def __init__(self, keys: list[Key], tenant: bytes, path_search: PathSearch, began: float) -> None:
        self.keys = keys
        self.tenant = tenant
        self.path = path_search
        self.began = began
        self.asked: dict[int, Future[bool]] = {}
        self.ended = self.failed = False


class Discovery:
    """`cache` is the view of the store. Results are entered between steps, by `progress`."""

    def __init__(
        self,
        cache: Cache,
        store: GuardedStore,
        names: ObjectNames,
        tenancy: Tenancy,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.cache = cache
        self.store = store
        self.names = names
        self.tenancy = tenancy
        self.asked_objects = 0
        self.unanswered = 0
        self._clock = clock
        self._drops: list[Future[None]] = []
        # Whether requests may ask; not while a drop is under way.
        self._asks = True
        self._closing = False
        self._pool = ThreadPoolExecutor(ASKERS, "weft-remote-asker")
        self._searches: dict[int, Search] = {}

    def awaited_by(self, waiter: int, keys: list[Key], limit: int, least: int, tenant: bytes) -> bool:
        """Return whether a request should wait for answers; ask for its path if it has not yet."""
        search = self._searches.get(waiter)
        if search is None:
            active = sum(not each.ended for each in self._searches.values())
            cells = min(limit // self.cache.cell, len(keys))
            known = self.cache.match(keys, limit).cached // self.cache.cell
            if not self._asks or self.store.away or active >= MOST_SEARCHES or cells <= max(least, known):
                return False
            path_search = PathSearch(cells, max(least, known), bool(self.cache.point_bytes))
            search = self._searches[waiter] = Search(keys[:cells], tenant, path_search, self._clock())
            self._ask(search)
        if search.ended:
            return False
        if self._clock() - search.began > PATIENCE_SECONDS:
            # What comes later is entered for other requests.
            self._note_failure(search)
            return False
        return True

    def silent(self, keys: list[Key]) -> bool:
        """Return whether the store did not answer when it was asked for a path."""
        return any(search.failed and search.keys == keys[: len(search.keys)] for search in self._searches.values())

    def leave(self, waiter: int) -> None:
        """Forget a request that has started or ended."""
        self._searches.pop(waiter, None)

    def _note_failure(self, search: Search) -> None:
        self.unanswered += not search.failed
        search.failed = True

    def _ask(self, search: Search) -> None:
        depths = search.path.next_round()
        if not depths:
            search.ended = True
            if search.path.result:
                self._enter(search, search.path.result)
            return
        kind = self._end_kind if search.path.of_points else Kind.PAGE
        for depth in depths:
            name = self.names.of_unit(kind, search.tenant, search.keys[depth - 1], depth * self.cache.cell)
            search.asked[depth] = self._pool.submit(self.store.has, name)
        self.asked_objects += len(depths)

    @property
    def _end_kind(self) -> Kind:
        return Kind.STATE if Kind.STATE in self.cache.arena.unit_bytes else Kind.WINDOW

    def progress(self) -> None:
        """Take the answers that have come, and ask on."""
        for search in list(self._searches.values()):
            if search.ended or not all(each.done() for each in search.asked.values()):
                continue
            asked, search.asked = search.asked, {}
            try:
                present = {depth for depth, each in asked.items() if each.result()}
            except StoreFailed:
                search.ended = True
                self._note_failure(search)
                continue
            search.path.answered(list(asked), present)
            self._ask(search)

    def wait(self, seconds: float) -> None:
        """Give answers and drops that are under way a little time."""
        asked: list[Future[Any]] = [each for search in self._searches.values() for each in search.asked.values()]
        under_way = asked + [each for each in self._drops if not each.done()]
        if under_way:
            wait_for(under_way, seconds)

    def close(self) -> None:
        self._closing = True
        self._pool.shutdown(cancel_futures=True)

    # the view -------------------------------------------------------------------------------------------------------

    def _enter(self, search: Search, depth: int) -> None:
        """Enter the cells of a path up to a depth, and the resume point there."""
        cache, parent = self.cache, None
        entered: list[Node] = []
        for place, key in enumerate(search.keys[:depth]):
            node = cache.trie.nodes.get(key)
            if node is None:
                page = take(cache, Kind.PAGE)
                if page is None:
                    break
                if not place:
                    self.tenancy.note(key, lambda: search.tenant)
                node = cache.publish(key, parent, page)
                entered.append(node)
            parent = node
        if parent is not None and parent.depth == depth and cache.point_bytes and parent.resume is None:
            self._enter_point(parent)
        for node in entered:
            cache.valuation.offer(node)

    def _enter_point(self, node: Node) -> None:
        cache, spec = self.cache, self.cache.spec
        position = node.depth * cache.cell
        first = first_window_cell(position, spec.window, spec.cell) if spec.window else node.depth
        cache.trie.pin(node)
        units = take_point(cache, position, node.depth - first, take)
        cache.unpin(node)
        if units is not None:
            point = PointCopy(node.key, position, Origin.REGULAR, PointUnits(None, ()), units)
            if node.key in cache.trie.nodes:
                hand_over(cache, point, units)
            else:
                release_point(cache, units)

    # drops ----------------------------------------------------------------------------------------------------------

    def stop_asking(self) -> None:
        """Ignore all answers under way, and ask for nothing, because they could bring back what is being dropped."""
        self._asks = False
        for search in self._searches.values():
            search.ended, search.asked = True, {}

    def ask_again(self) -> None:
        self._asks = True

    def drop(self, tenant: bytes | None, prefix: bytes | None) -> Future[None]:
        """Begin to drop the objects of a tenant, those at and below a prefix, or all of this model."""

        def parts() -> Iterator[Sequence[str]]:
            if prefix is None:
                return self.store.names(self.names.of_tenant(tenant))
            names = names_below(self.store, self.names, prefix, lambda: self._closing)
            return iter([names[first : first + NAMES_PER_DROP] for first in range(0, len(names), NAMES_PER_DROP)])

        def drop() -> None:
            for part in parts():
                self.store.drop(part)

        begun = self._pool.submit(drop)
        self._drops = [each for each in self._drops if not each.done()] + [begun]
        return begun
