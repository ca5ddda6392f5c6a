"""Chooses the states that a step writes, and their slots: for its own sequence, and for others to resume from.

`captures.py` says where states are worth keeping, `valuation.py` what they are worth; this module combines both with
what a lease knows about its prompt. The ledger calls it, and settles what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from weft.base.grid import floor_to_grid
from weft.memory.cache import Cache
from weft.memory.captures import (
    CaptureReasons,
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

# Memory counts as free while this share of it has never been used.
SPARE = 0.1
Wanted = tuple[int, Origin, int]  # position, reason, and tokens since the previous one


class Snapshots:
    """`reasons` are the enabled ones; `every` is the distance between states, 0 to derive it.

    No state of an answer is kept unless its lease shares it, or its sequence returns.
    """

    def __init__(self, cache: Cache, reasons: CaptureReasons, every: int, enabled: bool) -> None:
        self.cache = cache
        self.reasons = reasons
        self.enabled = enabled
        self.every = (every or spacing(cache.spec)) if reasons.regular else 0
        self._cell = cache.cell
        self._has_states = Kind.STATE in cache.arena.unit_bytes
        # A configured distance means exactly those states and no candidates. And only the value policy evicts
        # candidates before anything else.
        learned = cache.valuation.by_value and not every
        self.candidates = reasons.candidates and learned and self._has_states
        self._learns = reasons.popular and learned
        # Kept in case they are wanted; if states are so small that every cell has one, that costs nothing.
        heavy = self.every > self._cell
        self._on_trial = (Origin.RECALLED, Origin.BOUNDARY, Origin.REGULAR) if heavy and self._learns else ()
        # Ends of prompts too, but those that are not kept are at least candidates.
        self._ends_on_trial = self._learns and self.candidates and heavy
        # A slot in reserve while sequences run, so that one of them can always leave its cell.
        self.reserve: int | None = None

    # facts about a lease's prompt -----------------------------------------------------------------------------------

    def end_counts(self) -> bool:
        """Return whether the end of a prompt is worth a snapshot, and not only a candidate."""
        if not self._ends_on_trial:
            return True
        arena = self.cache.arena
        is_free = arena.used_slabs < (1 - SPARE) * arena.slabs
        seldom = SELDOM_IN_FREE_MEMORY if is_free else SELDOM
        return self.cache.valuation.popularity.worth_a_try(Origin.PROMPT_END, seldom)

    def notice_junction(self, lease: Lease) -> None:
        """Record where an earlier sequence diverged from this one, by its pages or by the list of evicted cells."""
        if not self.reasons.junction:
            lease.junction = 0
        elif self.reasons.popular and self.cache.point_bytes:
            seen = self.cache.seen(lease.keys, lease.miss)
            lease.recalled = seen if seen > lease.miss.kv_matched else 0
        # This is the case that candidates are for.
        self.cache.unproved = 0 if lease.junction or lease.recalled else self.cache.unproved + 1

    def origin(self, lease: Lease, position: int) -> Origin:
        """Return why a position of its sequence is kept."""
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
        """Return whether to keep the end of a sequence; always for a preempted one, which will return."""
        if lease.hidden:
            return False
        if lease.returns or here < lease.prompt:
            return True
        if not self.reasons.answers or (here > lease.prompt and not lease.shares_answer):
            return False
        return lease.retains_end or not self._learns or self.cache.valuation.popularity.worth_a_try(Origin.ANSWER_END)

    # states that a step writes --------------------------------------------------------------------------------------

    def own(self, start: int, end: int, certain: int) -> tuple[Capture, ...] | None:
        """Return the checkpoints that the sequence itself continues from, or None if there is no room for them.

        The step may be settled anywhere from `certain` on, and the sequence needs a checkpoint for each case.
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
        """Fill the reserve; call it when a sequence starts, and when slots may have become free."""
        if self.reserve is None and self._has_states:
            self.reserve = self.cache.take(Kind.STATE)

    def give_up_reserve(self) -> None:
        """Release the reserve: no sequence runs any more."""
        self.cache.release_slot(self.reserve)
        self.reserve = None

    def add(self, leases: Sequence[Lease], spare: bool) -> None:
        """Let the last grants of these leases also keep states for others, if there is spare memory.

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
        """Return positions in the lease's last grant that are worth keeping. Own checkpoints there are kept."""
        grant = lease.pending[-1]
        positions = self._chosen(lease, grant.start - grant.unverified_before, grant.end)
        if not positions:
            return []
        own = {capture.position for capture in grant.captures}
        kept = tuple(replace(c, keep=True) if c.position in positions else c for c in grant.captures)
        lease.pending[-1] = replace(grant, captures=kept)
        others = [position for position in positions if position not in own]
        return [
            (each, self.origin(lease, each), each - above) for above, each in pairwise([lease.miss.cached, *others])
        ]

    def _chosen(self, lease: Lease, start: int, end: int) -> list[int]:
        if lease.hidden:
            return []
        cell = self._cell
        end = end if lease.shares_answer else min(end, lease.prompt)
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
            if origin in self._on_trial and not self.cache.valuation.popularity.worth_a_try(origin):
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
