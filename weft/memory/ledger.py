"""Ownership of memory and contents of the cache: the interface between scheduling and memory.

Its verbs are in tokens (docs/design.md has a table): `match` a prompt with the cache, `open` a lease at its deepest
resume point, `advance` it over tokens that a plan will compute, `settle` what a landed flight has computed, `close` it,
and what admission, plans and drafts need besides. Touches no tensor.

    [0, cached) came with the lease   [cached, computed) is settled   [computed, planned) is in flight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.base.grid import cells_covering, first_window_cell, floor_to_grid
from weft.base.plan import Ints
from weft.base.retain import Retain
from weft.base.tenants import Dropped
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.capacity import NO_ROOM, Room, check_memory, slabs_alone
from weft.memory.captures import ALL_CAPTURES, CaptureReasons, Origin, repeatable
from weft.memory.keys import Key
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.lease import Grant, Lease
from weft.memory.misses import Miss, Reason
from weft.memory.removal import Hidden
from weft.memory.retention import Retentions
from weft.memory.saved.carried import Carried
from weft.memory.snapshots import Snapshots
from weft.memory.spec import MemorySpec
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.exchange.departures import Aloft, Departures, staging
from weft.memory.tiers.tiers import Tiers
from weft.memory.tiers.units import PointUnits
from weft.memory.trie import cells_without_holders, path

# Makes the tiers below the device's memory.
MakeTiers = Callable[[Cache, Tenancy], Tiers]


class Places(NamedTuple):
    """Where the rows of a plan find their memory. Window pages begin at the cells `window_first`."""

    read_slot: Ints
    tail: Ints
    page_table: Ints
    window_table: Ints
    window_first: Ints


class Ledger:
    """The arrays are indexed by seat and hold what plans are gathered from.

    `below` returns the tiers below the device's memory. `departures_bytes` stage prefixes for other engines.
    """

    def __init__(
        self,
        spec: MemorySpec,
        budget_bytes: int,
        seats: int,
        max_length: int,
        cache: bool = True,
        eviction: str = "value",
        capture_every: int = 0,
        remember_freed: bool = False,
        captures: CaptureReasons = ALL_CAPTURES,
        alpha: float = 1.0,
        private_answers: bool = False,
        below: MakeTiers | None = None,
        departures_bytes: int = 0,
        retain_share: float = 0.0,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.spec = spec
        self.cell = spec.cell
        self.window = spec.window
        self.window_cells = spec.window_cells
        self.enabled = cache
        # Cells of answers are published only for their own sequence's return, because prompts never match their keys.
        self.private_answers = private_answers
        check_memory(spec, budget_bytes)
        self.arena = Arena(unit_bytes(spec), budget_bytes, remember_freed)
        self.cache = Cache(spec, self.arena, eviction, alpha)
        self.snapshots = Snapshots(self.cache, captures, capture_every, enabled=cache)
        self.carried = Carried(self)
        self.tiers: Tiers | None = None
        self.tenancy = Tenancy(
            lambda: [cache.trie for cache in self.caches],
            lambda: () if self.tiers is None else self.tiers.under_way(),
        )
        if below is not None:
            self.tiers = below(self.cache, self.tenancy)
        host = None if self.tiers is None else self.tiers.host
        self.retentions = Retentions(self.cache, retain_share, budget_bytes, now, None if host is None else host.saves)
        self.departures: Departures | None = None
        if departures_bytes:
            level = 0 if self.tiers is None else len(self.tiers.links)
            self.departures = staging(spec, self.cache, departures_bytes, level)
        self.hidden = Hidden()
        self.leases: dict[int, Lease] = {}
        # The last requests whose resume points were protected, and how many states had been kept by then.
        self._kept_for: tuple[list[int], int] = ([], 0)
        # States that become free or evictable as soon as all flights have landed.
        self.states_to_land = 0
        self._promises: dict[Key, Lease] = {}
        cells = cells_covering(max_length, spec.cell) + 1
        self.planned = np.zeros(seats, np.int64)
        self.computed = np.zeros(seats, np.int64)
        self.page_table = np.zeros((seats, cells), np.int32)
        self.window_table = np.zeros((seats, cells), np.int32)
        self.read_slot = np.zeros(seats, np.int32)
        self.tail = np.zeros(seats, np.int32)

    @property
    def caches(self) -> list[Cache]:
        """The caches of all tiers, the device's first."""
        return [self.cache, *(link.lower for link in (self.tiers.links if self.tiers is not None else ()))]

    @property
    def tier_names(self) -> list[str]:
        return ["device", *(link.name for link in (self.tiers.links if self.tiers is not None else ()))]

    # match ----------------------------------------------------------------------------------------------------------

    def match(self, keys: list[Key], limit: int, plain: Key | None = None) -> Miss:
        """Return how much of a prompt could be resumed, and why not more. At most `limit` tokens may come from the
        cache.

        `plain` is the unsalted key of the first cell, which identifies a prompt that another tenant has sent.
        """
        if not self.enabled:
            reusable = floor_to_grid(limit, self.cell)
            return Miss(Reason.CACHE_OFF, 0, 0, reusable, reusable)
        return self.cache.match(keys, limit, plain)

    def expects(self, keys: list[Key], match: Miss, limit: int) -> bool:
        """Return whether a running sequence is about to compute more of this prompt than is cached.

        If so, that sequence is asked to keep a resume point where the two diverge, so that waiting for it saves the
        work.
        """
        cell = self.cell
        depth = match.kv_matched // cell
        while depth < min(limit // cell, len(keys)) and keys[depth] in self._promises:
            depth += 1
        lease = self._promises.get(keys[depth - 1]) if depth else None
        position = depth * cell
        if lease is None or position <= match.cached:
            return False
        if self.cache.point_bytes == 0:
            return True
        if position > lease.decided:
            lease.asked.add(position)
            return True
        return any(c.keep and c.position == position for grant in lease.pending for c in grant.captures)

    def awaits(
        self,
        waiter: int,
        keys: list[Key],
        limit: int,
        match: Miss,
        tenant: Callable[[], bytes],
        ahead_tokens: Callable[[], int],
    ) -> bool:
        """Return whether a request waits because more of its prefix than `match` is on its way from a tier below.

        `ahead_tokens` returns how many tokens are computed before those of a request that starts now.
        """
        if self.tiers is None or not limit:
            return False
        return self.tiers.bring(waiter, keys, limit, match, tenant, ahead_tokens())

    def prefetch(
        self,
        waiter: int,
        keys: list[Key],
        limit: int,
        tokens: int,
        tenant: Callable[[], bytes],
        ahead_tokens: Callable[[], int],
    ) -> None:
        """Load the retained prefix of a request that cannot start yet from host memory, if there is room."""
        if not limit or not self.retentions.may_be_below(keys):
            return
        match = self.match(keys, limit)
        if self.room_for(keys, match.cached, tokens) is not None:
            self.awaits(waiter, keys, limit, match, tenant, ahead_tokens)

    def withdraw(self, waiter: int) -> None:
        """Forget a request that has ended while it waited."""
        if self.tiers is not None:
            self.tiers.leave(waiter)

    def keep_for(self, waiters: list[int], waiting: Iterable[tuple[list[Key], int]]) -> None:
        """Protect the resume points of requests that wait for memory, given by their keys and cache limits."""
        seen = (waiters, self.cache.counts.captures_kept)
        if seen == self._kept_for or not self.enabled or not self.cache.point_bytes:
            return
        self._kept_for = seen
        cells = [(keys, self.cache.match(keys, limit).cached // self.cell) for keys, limit in waiting]
        nodes = [self.cache.trie.nodes[keys[depth - 1]] for keys, depth in cells if depth]
        self.cache.valuation.expect({node.resume for node in nodes if node.resume is not None})

    @property
    def only_retained(self) -> bool:
        """Return whether everything cached is retained."""
        return self.cache.points == self.retentions.points and len(self.cache.trie) == self.cache.trie.held

    def hides(self, keys: Sequence[Key], tenant: Callable[[], bytes]) -> bool:
        """Return whether a prefix of these keys, of the tenant with this digest, is being dropped."""
        return bool(self.hidden) and self.hidden.covers(keys, tenant)

    def hide(self, dropped: Dropped) -> None:
        """Let no request reuse what an operator drops; end what is retained of it, or would be."""
        self.hidden.add(dropped)
        self.retentions.drop(self.tenancy.chooser(dropped.tenant, dropped.prefix))
        for lease in self.leases.values():
            if lease.tenant is not None and self.hidden.covers(lease.keys, lease.tenant):
                lease.retain = ()

    # open -----------------------------------------------------------------------------------------------------------

    def open(
        self,
        seat: int,
        keys: list[Key],
        prompt: int,
        limit: int,
        asked: Iterable[int] = (),
        plain: Key | None = None,
        boundaries: Iterable[int] = (),
        hidden: bool = False,
        tenant: Callable[[], bytes] | None = None,
        retain: Sequence[Retain] = (),
        shares_answer: bool = False,
    ) -> Lease | None:
        """Return a lease on everything up to the deepest resume point, or None if not even a tail is available.

        `asked` are positions that the caller declared, `boundaries` those where messages end. A `hidden` prefix is
        being dropped: the lease starts from nothing, and nothing of it is kept. `tenant` returns the tenant's digest,
        `retain` is what to retain at the lease's end; a lease that `shares_answer` publishes the cells of its answer.
        """
        assert seat not in self.leases
        ends = self._on_grid(boundaries) if self.snapshots.reasons.boundaries else frozenset[int]()
        if hidden:
            reusable = floor_to_grid(limit, self.cell)
            miss = Miss(Reason.BEING_DROPPED, 0, 0, reusable, reusable)
        else:
            # Only here: waiting requests are matched at every step, and a lost retention is looked for cell by cell.
            miss = self.carried.explain(keys, self.retentions.explain(keys, self.match(keys, limit, plain)))
            if self.tiers is not None:
                miss = self.tiers.explain(keys, limit, miss)
        kept = (repeatable(prompt, self.cell) if each.tokens is None else each.tokens for each in retain)
        lease = Lease(seat, keys, prompt, set(self._on_grid([*asked, *kept])), miss, ends)
        lease.hidden, lease.tenant = hidden, tenant
        lease.shares_answer = shares_answer or not self.private_answers
        lease.retain = () if hidden or tenant is None else retain
        self.resume(lease, lease.miss.cached)
        if Kind.TAIL in self.arena.unit_bytes:
            tail = self.cache.take(Kind.TAIL)
            if tail is None:
                self.let_go(lease)
                return None
            lease.tail = self.tail[seat] = tail
        self.leases[seat] = lease
        self.snapshots.fill_reserve()
        lease.end_counts = self.snapshots.end_counts()
        if self.enabled and not hidden:
            for key in keys[lease.published : self.publishable(lease, len(keys) * self.cell) // self.cell]:
                self._promises.setdefault(key, lease)
            self.snapshots.notice_junction(lease)
            self.cache.looked_up(plain, keys, lease.miss)
        if self.tiers is not None and not hidden:
            self.tiers.opened(keys, limit, lease.node)
        return lease

    def count_start(self, waiter: int, miss: Miss, again: bool) -> dict[str, int]:
        """Count a start, which may be one after a preemption; return how many tokens were loaded for it, by tier."""
        self.cache.count(miss, again)
        return {} if self.tiers is None else self.tiers.leave(waiter, miss.cached)

    def _on_grid(self, positions: Iterable[int]) -> frozenset[int]:
        return frozenset(floor_to_grid(position, self.cell) for position in positions)

    def resume(self, lease: Lease, cached: int) -> None:
        seat, depth = lease.seat, cached // self.cell
        self.planned[seat] = self.computed[seat] = lease.decided = cached
        lease.cells = lease.published = lease.shared = lease.window_first = depth
        if not depth:
            return
        node = self.cache.trie.nodes[lease.keys[depth - 1]]
        nodes = path(node)
        if Kind.PAGE in self.arena.unit_bytes:
            self.page_table[seat, :depth] = [n.page or 0 for n in nodes]
        lease.node = node
        self.cache.started(node)
        slot, window = self.cache.pin(node)
        lease.slot = slot
        self.read_slot[seat] = slot or 0
        if window:
            lease.window_first = depth - len(window)
            self.window_table[seat, lease.window_first : depth] = window

    # advance --------------------------------------------------------------------------------------------------------

    def advance(self, lease: Lease, end: int, certain: int | None = None, unverified: int = 0) -> Grant | None:
        """Allocate memory for the tokens up to `end`, or return None (pages already found stay for a retry).

        Tokens beyond `certain` are drafts: the step may be settled anywhere from there on. So are `unverified` tokens
        in flight: the grant may turn out to start that much earlier, and `settle` of the flight before moves it.
        """
        seat, start = lease.seat, int(self.planned[lease.seat])
        assert start < end
        if not self._grow(lease, end):
            return None
        certain = end if certain is None else certain
        captures = self.snapshots.own(start - unverified, end, certain - unverified)
        if captures is None:
            return None
        earlier = lease.pending[-1].checkpoint_at(start - unverified) if lease.pending else lease.slot
        grant = Grant(start, end, lease.slot, captures, unverified, earlier if unverified else None)
        lease.pending.append(grant)
        self.states_to_land += _to_land(grant)
        self._read(lease, grant.checkpoint_at(end) if not unverified else _checkpoint_after(grant))
        self.planned[seat] = end
        return grant

    def _read(self, lease: Lease, slot: int | None) -> None:
        """Let the next tokens of a lease continue from a checkpoint."""
        lease.slot = slot
        self.read_slot[lease.seat] = slot or 0

    def snapshot(self, leases: Sequence[Lease], spare: bool = True) -> dict[int, Grant]:
        """Let the last grants of these leases also keep states for others, and return them by seat.

        Call it once per step, when all its rows have what they need: snapshots take only what is left. If a row found
        no memory (`spare` is false), none is taken, and only checkpoints that sequences write anyway are kept.
        """
        self.snapshots.add(leases, spare)
        for lease in leases:
            lease.decided = lease.pending[-1].end
            self.states_to_land += sum(not capture.own for capture in lease.pending[-1].captures)
        return {lease.seat: lease.pending[-1] for lease in leases}

    def needs_grant(
        self, seats: NDArray[np.int64], tokens: NDArray[np.int64] | int = 1, unverified: NDArray[np.int64] | int = 0
    ) -> NDArray[np.bool_]:
        """Return which of these leases need memory or leave a cell with `tokens` more; others use `advance_each`.

        With `unverified` tokens in flight, one of several cases may.
        """
        offset: NDArray[np.int64] = (self.planned[seats] - unverified) % self.cell
        border: NDArray[np.bool_] = (offset == 0) | (offset + unverified + tokens >= self.cell)
        return border

    def advance_each(self, seats: NDArray[np.int64], tokens: NDArray[np.int64] | int = 1) -> None:
        """Advance leases that stay inside their cell."""
        self.planned[seats] += tokens

    def _grow(self, lease: Lease, end: int) -> bool:
        """Allocate pages and window pages up to `end`, all or none. A failed try leaves its pages with the lease."""
        first, missing = lease.cells, cells_covering(end, self.cell) - lease.cells
        tables = {Kind.PAGE: self.page_table, Kind.WINDOW: self.window_table}
        taken = {kind: self._take_up_to(missing, kind) for kind in tables if kind in self.arena.unit_bytes}
        got = min((len(units) for units in taken.values()), default=max(0, missing))
        for kind, units in taken.items():
            tables[kind][lease.seat, first : first + got] = units[:got]
            for unit in units[got:]:
                self.arena.release(kind, unit)
        lease.cells += got
        return got >= missing

    def _take_up_to(self, count: int, kind: Kind) -> list[int]:
        units: list[int] = []
        while len(units) < count and (unit := self.cache.take(kind)) is not None:
            units.append(unit)
        return units

    # what a plan says -----------------------------------------------------------------------------------------------

    def locate(
        self, seats: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64], grants: dict[int, Grant]
    ) -> Places:
        """Return where rows with tokens [start, end) find their memory; `grants` are those of this step, by row."""
        read_slot = self.read_slot[seats]
        # The ledger is already past this step where a sequence leaves its cell.
        for row, grant in grants.items():
            read_slot[row] = grant.read_slot or 0
        cells = -(-end // self.cell)
        width = int(cells.max()) if Kind.PAGE in self.arena.unit_bytes else 0
        page_table = self.page_table[seats, :width]
        if not self.window:
            none = np.zeros(len(seats), np.int32)
            return Places(read_slot, self.tail[seats], page_table, np.zeros((len(seats), 0), np.int32), none)
        first = np.maximum(0, start - self.window + 1) // self.cell
        columns = first[:, None] + np.arange(int((cells - first).max()))
        np.minimum(columns, self.window_table.shape[1] - 1, out=columns)
        window_table = self.window_table[seats[:, None], columns]
        return Places(read_slot, self.tail[seats], page_table, window_table, first.astype(np.int32))

    def take_freed(self) -> tuple[tuple[str, int], ...]:
        """Return the units that were freed since the last plan."""
        freed = tuple(self.arena.freed)
        self.arena.freed.clear()
        return freed

    def aloft(self, lease: Lease, grant: Grant, flight: Any, step: int, last: int) -> Aloft:
        """Return what a flight computes of a prefix that departs: pages, and the resume point at its end, `last`."""
        first, end = grant.start // self.cell, grant.end // self.cell
        pages = self.page_table[lease.seat, first:end].tolist() if Kind.PAGE in self.arena.unit_bytes else ()
        return Aloft(flight, step, first, tuple(pages), self.point_at(lease, last) if grant.end == last else None)

    def point_at(self, lease: Lease, position: int) -> PointUnits:
        """Return the units of the resume point where a lease ends or will end, a position on the grid."""
        return PointUnits(lease.slot, self._window_before(lease, position))

    # settle ---------------------------------------------------------------------------------------------------------

    def settle(self, lease: Lease, grant: Grant | None, accepted: int) -> None:
        """Settle a landed flight: its tokens up to `accepted` are valid; publish what it wrote for them.

        Without a grant, it has stayed inside its cell, and no other flight is planned. If `accepted` is less than the
        grant's end, the rest is undone: the tail's cursor moves back, and states beyond it are freed.
        """
        if grant is None:
            self.computed[lease.seat] = self.planned[lease.seat] = accepted
            return
        landed = lease.pending.pop(0)
        assert landed is grant or grant.unverified_before, "flights land in the order of their launch"
        assert landed.start <= accepted <= landed.end
        self.computed[lease.seat] = accepted
        self.states_to_land -= _to_land(landed)
        self.planned[lease.seat] -= landed.end - accepted
        lease.decided = min(lease.decided, int(self.planned[lease.seat]))
        if self.enabled:
            self.publish_cells(lease, accepted)
        self._settle_captures(lease, landed, accepted)
        self.move_next(lease, accepted, landed.checkpoint_at(accepted))
        self.drop_window(lease)

    def move_next(self, lease: Lease, start: int, slot: int | None) -> None:
        """Let the grant of the next flight start where the one before it was settled, and read that checkpoint.

        Its other captures were not written, and are released.
        """
        grant = lease.pending[0] if lease.pending else None
        if grant is None:
            return
        assert grant.start - grant.unverified_before <= start <= grant.start, "a later flight builds on more"
        if not grant.unverified_before:
            return
        end = start + grant.end - grant.start
        written = tuple(c for c in grant.captures if start < c.position <= end)
        moved = Grant(start, end, slot, written)
        self.states_to_land += _to_land(moved) - _to_land(grant)
        lease.pending[0] = moved
        for capture in grant.captures:
            if capture not in written:
                self.cache.release_slot(capture.slot)
        self._read(lease, moved.checkpoint_at(end))

    def settle_each(self, seats: Ints, ends: Ints) -> None:
        """Settle tokens that stayed inside their cells."""
        self.computed[seats] = ends

    def undo_each(self, seats: Ints, ends: Ints, refused: NDArray[np.int64]) -> None:
        """Settle tokens of drafts that stayed inside their cells; those beyond `ends` are undone."""
        self.computed[seats] = ends
        self.planned[seats] -= refused
        for seat, end in zip(seats.tolist(), ends.tolist(), strict=True):
            lease = self.leases[seat]
            if lease.pending:
                self.move_next(lease, end, lease.pending[0].read_slot)

    def publish_cells(self, lease: Lease, accepted: int) -> None:
        node = lease.node
        first, end = lease.published, self.publishable(lease, accepted) // self.cell
        paged = Kind.PAGE in self.arena.unit_bytes
        pages = self.page_table[lease.seat, first:end].tolist() if paged else [None] * max(0, end - first)
        for depth, page in enumerate(pages, first):
            key = lease.keys[depth]
            if not depth and lease.tenant is not None:
                self.tenancy.note(key, lease.tenant)
            node = self.cache.publish(key, node, page)
            if node.page != page:
                # Another sequence published the same cell first: use its page from now on.
                self.page_table[lease.seat, depth] = node.page or 0
            if self._promises.get(key) is lease:
                del self._promises[key]
            lease.published = depth + 1
        if node is not lease.node:
            assert node is not None
            self.cache.trie.pin(node)
            self.cache.unpin(lease.node)
            lease.node = node

    def publishable(self, lease: Lease, computed: int) -> int:
        """Return up to where the computed tokens of a lease are for others."""
        if lease.hidden:
            return 0
        return computed if lease.shares_answer or lease.returns else min(computed, lease.prompt)

    def _settle_captures(self, lease: Lease, grant: Grant, accepted: int) -> None:
        standing = [c for c in grant.captures if c.position <= accepted]
        for capture in standing:
            if capture.keep:
                self.keep_capture(lease, capture.position, capture.slot)
        own = [c for c in grant.captures if c.own]
        # The sequence continues from its last valid checkpoint and leaves the one before.
        reached = [grant.read_slot, *(c.slot for c in own if c in standing)]
        if own and accepted < grant.end:
            self._read(lease, reached[-1])
        left = [*(reached[:-1] if own else []), *(c.slot for c in grant.captures if not c.own or c not in standing)]
        for slot in left:
            self.cache.release_slot(slot)
        self.snapshots.fill_reserve()

    def keep_capture(self, lease: Lease, position: int, slot: int | None) -> None:
        """Make a computed position a resume point; its slot and window pages get one more owner."""
        key = lease.keys[position // self.cell - 1]
        self.cache.keep(key, slot, self._window_before(lease, position))
        self.explain_kept(key, self.snapshots.origin(lease, position))

    def _window_before(self, lease: Lease, position: int) -> tuple[int, ...]:
        """Return the window pages that a sequence which resumes at a position reads."""
        if not self.window:
            return ()
        first = first_window_cell(position, self.window, self.cell)
        assert lease.window_first <= first
        return tuple(self.window_table[lease.seat, first : position // self.cell].tolist())

    def explain_kept(self, key: Key, origin: Origin) -> None:
        """Set why a position is a resume point, and save it to the tier below."""
        self.cache.explain(key, origin)
        if self.tiers is not None:
            self.tiers.kept(key)

    def drop_window(self, lease: Lease) -> None:
        """Release window pages that neither this sequence nor a resume point at its last grid position can see."""
        if not self.window:
            return
        here = floor_to_grid(int(self.computed[lease.seat]), self.cell)
        first = first_window_cell(here, self.window, self.cell)
        for depth in range(lease.window_first, first):
            self.arena.release(Kind.WINDOW, int(self.window_table[lease.seat, depth]))
        lease.window_first = max(lease.window_first, first)

    # close ----------------------------------------------------------------------------------------------------------

    def close(self, lease: Lease, returns: bool = False) -> None:
        """Close the lease of a sequence that has ended, or `returns` after a preemption.

        What it computed stays, with a resume point at its end.
        """
        lease.returns = returns
        assert not lease.pending, "a flight still carries this lease"
        here = floor_to_grid(int(self.computed[lease.seat]), self.cell)
        if self.enabled and lease.returns:
            self.publish_cells(lease, here)
        if self.enabled and here and self.cache.point_bytes and self.snapshots.wants_end(lease, here):
            self.keep_capture(lease, here, lease.slot)
            if self.snapshots.reasons.answers:
                self.explain_kept(lease.keys[here // self.cell - 1], Origin.ANSWER_END)
        elif self.tiers is not None and lease.node is not None and not self.cache.point_bytes:
            self.tiers.kept(lease.node.key)
        for key in lease.keys[lease.published :]:
            if self._promises.get(key) is lease:
                del self._promises[key]
        del self.leases[lease.seat]
        if self.enabled and not returns and lease.retain and lease.tenant is not None:
            self.retentions.ask(lease.retain, lease.keys, lease.prompt, lease.tenant())
        self.let_go(lease)
        if not self.leases:
            self.snapshots.give_up_reserve()

    def let_go(self, lease: Lease) -> None:
        if Kind.PAGE in self.arena.unit_bytes:
            for page in self.page_table[lease.seat, lease.published : lease.cells].tolist():
                self.arena.release(Kind.PAGE, page)
        if Kind.WINDOW in self.arena.unit_bytes:
            for page in self.window_table[lease.seat, lease.window_first : lease.cells].tolist():
                self.arena.release(Kind.WINDOW, page)
        if lease.slot is not None:
            self.cache.release_slot(lease.slot)
        if lease.tail is not None:
            self.arena.release(Kind.TAIL, lease.tail)
        self.cache.unpin(lease.node)

    # capacity -------------------------------------------------------------------------------------------------------

    @property
    def memory_to_land(self) -> bool:
        """Whether flights or copies that are under way will free memory, or make it evictable."""
        copies = self.carried.moving or (self.tiers is not None and self.tiers.in_flight)
        return bool(self.states_to_land or copies or (self.departures is not None and self.departures.in_flight))

    def clear(self, tiers: bool = False, retained: bool = True) -> int:
        """Drop everything that no running sequence uses, also from the `tiers` below; return how many tokens stay.

        With `retained`, what requests retain too.
        """
        self.carried.give_up()
        if retained:
            self.retentions.give_up(below=tiers)
        self.cache.clear()
        if tiers and self.tiers is not None:
            self.tiers.clear()
        return len(self.cache.trie) * self.cell

    def fits_alone(self, tokens: int) -> bool:
        """Return whether a sequence of this length could run if it had all memory to itself."""
        return self.bytes_alone(tokens) <= self.arena.slabs * self.arena.slab_bytes

    def bytes_alone(self, tokens: int) -> int:
        """Return the bytes that a sequence of this length needs when alone, in whole slabs."""
        return slabs_alone(self.spec, self.arena.unit_bytes, self.arena.slab_bytes, tokens) * self.arena.slab_bytes

    def room_for(self, keys: list[Key], cached: int, tokens: int, others: Room = NO_ROOM) -> Room | None:
        """Return what a sequence of `tokens` that resumes at `cached` needs, and a further cell of it.

        Counts everything that cannot be evicted while it runs, including the cached path that it reads from. Returns
        None if there is no room for it beside the running sequences and `others`; a lone one has all there is. Then
        what is retained makes room, if there is host memory.
        """
        node = self.cache.trie.nodes[keys[cached // self.cell - 1]] if cached else None
        new = cells_covering(tokens + self.cell, self.cell) - cached // self.cell
        window = min(cells_covering(tokens, self.cell), self.window_cells + 2)
        needed = Room(cells_without_holders(node) + new, window, 1)
        alone = not self.leases and not others.sequences
        if alone or self.has_room(needed + others):
            return needed
        self.makes_room((self._slabs_beside_leases(needed + others) - self.arena.slabs) * self.arena.slab_bytes)
        return None

    def makes_room(self, lacking_bytes: int = 1) -> bool:
        """Return whether retained prefixes move to host memory, because there is no memory beside them."""
        return self.retentions.make_room(lacking_bytes)

    def has_room(self, needed: Room) -> bool:
        """Return whether there is room beside the running sequences and a further cell of each."""
        return self._slabs_beside_leases(needed) <= self.arena.slabs

    def held_slabs(self) -> int:
        """Return the slabs that running sequences and a further cell of each need; the cache has the others."""
        return self._slabs_beside_leases(NO_ROOM)

    def _slabs_beside_leases(self, needed: Room) -> int:
        leases = self.leases.values()
        count = len(leases) + needed.sequences
        units = {
            Kind.PAGE: needed.pages
            + self.cache.trie.held
            + self.carried.count(Kind.PAGE)
            + sum(lease.cells - lease.published + 1 for lease in leases),
            Kind.WINDOW: needed.window
            + self.retentions.window_pages
            + self.carried.count(Kind.WINDOW)
            + sum(lease.cells - lease.window_first + 1 for lease in leases),
            Kind.STATE: 2 * count + self.retentions.points + self.carried.count(Kind.STATE),
            Kind.TAIL: count,
        }
        return sum(self.arena.slabs_for(kind, units[kind]) for kind in self.arena.unit_bytes)


def _checkpoint_after(grant: Grant) -> int | None:
    """Return the slot to read after a grant if it starts where it says: the flight before writes those up to there."""
    slots = [capture.slot for capture in grant.captures if capture.own and capture.position > grant.start]
    return slots[-1] if slots else grant.read_slot


def _to_land(grant: Grant) -> int:
    """Return how many states become free when the grant's flight has landed: all but the one its sequence keeps."""
    first = grant.read_slot is None and any(capture.own for capture in grant.captures)
    return len(grant.captures) - first
