"""Which states a step writes, and the slots for them: for its own sequence, and for others to resume from.

Where states are worth keeping is said by `captures.py`, what they are worth by `worth.py`; here the two meet with what
a lease knows of its prompt. The ledger asks, and settles what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from weft.base.grid import floor_to_grid
from weft.memory.cache import Cache
from weft.memory.captures import (
    Captures,
    Origin,
    candidates,
    candidates_at_end,
    density,
    origin_of,
    positions_to_capture,
    spacing,
)
from weft.memory.kinds import Kind
from weft.memory.lease import Capture, Lease
from weft.memory.popularity import SELDOM, SELDOM_IN_FREE_MEMORY

# Memory counts as free while so much of it has never been needed.
SPARE = 0.1
Wanted = tuple[int, Origin, int]  # position, why, and tokens since the one before


class Snapshots:
    """`reasons` are those that count; `every` is how far apart states are to lie, 0 if nobody says so."""

    def __init__(self, cache: Cache, reasons: Captures, every: int, enabled: bool) -> None:
        self.cache = cache
        self.reasons = reasons
        self.enabled = enabled
        self.every = (every or spacing(cache.spec)) if reasons.regular else 0
        self._cell = cache.cell
        self._has_states = Kind.STATE in cache.arena.unit_bytes
        # Who says how far apart states are to lie gets them so, and none between. And only by value do they go before
        # anything else.
        learned = cache.worth.by_value and not every
        self.candidates = reasons.candidates and learned and self._has_states
        self._learns = reasons.popular and learned
        # Kept on the chance of being wanted; where states are so light that every cell has one, that costs nothing.
        heavy = self.every > self._cell
        self._on_trial = (Origin.RECALLED, Origin.BOUNDARY, Origin.REGULAR) if heavy and self._learns else ()
        # Ends of prompts too, but that they are candidates at least.
        self._ends_on_trial = self._learns and self.candidates and heavy
        # A slot in reserve while sequences run, so that one of them can always leave its cell.
        self.reserve: int | None = None

    # what a lease knows of its prompt -------------------------------------------------------------------------------

    def end_counts(self) -> bool:
        """Is the end of a prompt worth a snapshot, and not only a candidate?"""
        if not self._ends_on_trial:
            return True
        arena = self.cache.arena
        is_free = arena.used_slabs < (1 - SPARE) * arena.slabs
        seldom = SELDOM_IN_FREE_MEMORY if is_free else SELDOM
        return self.cache.worth.popularity.worth_a_try(Origin.PROMPT_END, seldom)

    def notice_junction(self, lease: Lease) -> None:
        """Where an earlier sequence parted from this one: by its pages, or by the memory of what was evicted."""
        if not self.reasons.junction:
            lease.junction = 0
        elif self.reasons.popular and self.cache.point_bytes:
            seen = self.cache.seen(lease.keys, lease.miss)
            lease.recalled = seen if seen > lease.miss.kv_matched else 0
        # That is what candidates are there for.
        self.cache.unproved = 0 if lease.junction or lease.recalled else self.cache.unproved + 1

    def origin(self, lease: Lease, position: int) -> Origin:
        """Why a position of its sequence is kept."""
        origin = origin_of(
            position,
            prompt=lease.prompt,
            junction=lease.junction,
            asked=lease.asked,
            boundaries=lease.boundaries,
            every=self.every,
            cell=self._cell,
            recalled=lease.recalled,
        )
        return Origin.CANDIDATE if origin is Origin.PROMPT_END and not lease.end_counts else origin

    def wants_end(self, lease: Lease, here: int) -> bool:
        """Keep where a sequence ends? One that gave way will be back."""
        if lease.returns or here < lease.prompt:
            return True
        if not self.reasons.answers:
            return False
        return not self._learns or self.cache.worth.popularity.worth_a_try(Origin.ANSWER_END)

    # what a step writes ---------------------------------------------------------------------------------------------

    def own(self, start: int, end: int, certain: int) -> tuple[Capture, ...] | None:
        """Checkpoints that the sequence itself goes on from, or None if there is no room for them.

        The step may be settled anywhere from `certain` on, and the sequence must find one wherever that is.
        """
        captures: list[Capture] = []
        if not self._has_states:
            return ()
        first = max(floor_to_grid(certain, self._cell), floor_to_grid(start, self._cell) + self._cell)
        for position in range(first, end + 1, self._cell):
            slot = self.cache.take(Kind.STATE)
            if slot is None:
                slot, self.reserve = self.reserve, None
            if slot is None:
                for capture in captures:
                    self.cache.release_slot(capture.slot)
                return None
            self.cache.written_for[slot] = position
            captures.append(Capture(position, slot, own=True, keep=False))
        return tuple(captures)

    def fill_reserve(self) -> None:
        """Call when a sequence begins, and when slots may have come free."""
        if self.reserve is None and self._has_states:
            self.reserve = self.cache.take(Kind.STATE)

    def give_up_reserve(self) -> None:
        """No sequence runs any more."""
        self.cache.release_slot(self.reserve)
        self.reserve = None

    def add(self, leases: Sequence[Lease], spare: bool) -> None:
        """Let the grants that these leases were last given also leave states for others, where memory is to spare.

        Candidates of all rows come after everything else.
        """
        if not self.enabled or not self.cache.point_bytes:
            return
        last = []
        for lease in leases:
            wanted = self._wanted(lease)
            self._capture(lease, [each for each in wanted if each[1] is not Origin.CANDIDATE], spare)
            last.append((lease, [each for each in wanted if each[1] is Origin.CANDIDATE]))
        for lease, found in last if spare else ():
            self._capture(lease, found, spare)

    def _wanted(self, lease: Lease) -> list[Wanted]:
        """Positions that the lease's last grant passes and that are worth keeping. Own checkpoints there are kept."""
        grant = lease.pending[-1]
        positions = self._chosen(lease, grant.start, grant.end)
        own = {capture.position for capture in grant.captures}
        kept = tuple(replace(c, keep=True) if c.position in positions else c for c in grant.captures)
        lease.pending[-1] = replace(grant, captures=kept)
        others = [position for position in positions if position not in own]
        return [
            (each, self.origin(lease, each), each - above) for above, each in pairwise([lease.miss.cached, *others])
        ]

    def _chosen(self, lease: Lease, start: int, end: int) -> list[int]:
        cell = self._cell
        chosen = positions_to_capture(
            start,
            end,
            prompt=lease.prompt,
            junction=lease.junction,
            asked=lease.asked,
            every=self.every,
            cell=cell,
            boundaries=lease.boundaries,
            recalled=lease.recalled,
        )
        if not self.candidates or start >= lease.prompt:
            return chosen
        every, last = density(self.cache.unproved), min(end, lease.prompt)
        found = candidates(start, last, cell, every) + candidates_at_end(start, last, lease.prompt, cell, every)
        return sorted({*chosen, *found})

    def _capture(self, lease: Lease, wanted: list[Wanted], spare: bool) -> None:
        """Take slots where there is room; skip and count the others."""
        captures, before = [], lease.miss.cached
        for position, origin, gap in wanted:
            slot = None
            if origin in self._on_trial and not self.cache.worth.popularity.worth_a_try(origin):
                continue
            if self._has_states:
                saved = gap if origin is Origin.CANDIDATE else position - before
                slot = self.cache.take_for(origin, max(self._cell, saved)) if spare else None
                if slot is None:
                    if origin is not Origin.CANDIDATE:
                        self.cache.skipped(lease.keys, position)
                    continue
                self.cache.written_for[slot] = position
            before = position
            captures.append(Capture(position, slot, own=False, keep=True))
        if captures:
            grant = lease.pending[-1]
            found = sorted((*grant.captures, *captures), key=lambda capture: capture.position)
            lease.pending[-1] = replace(grant, captures=tuple(found))
