"""Which states a step writes on its way, and the slots for them: for its own sequence, and for others to resume from.

Where states are worth keeping is said by `captures.py`, what they are worth by `worth.py`; here the two meet with what
a lease knows of its prompt. The ledger asks, and settles what was written.
"""

from __future__ import annotations

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

    def on_the_way(self, lease: Lease, start: int, end: int, certain: int) -> tuple[Capture, ...] | None:
        """From `start` to `end`, which may be settled from `certain` on.

        Nothing if the sequence's own checkpoint finds no room.
        """
        cell = self._cell
        if self.cache.point_bytes == 0:
            return ()
        chosen = self._chosen(lease, start, end) if self.enabled else []
        # Wherever the step may be settled, the sequence must find its own checkpoint.
        first = max(floor_to_grid(certain, cell), floor_to_grid(start, cell) + cell)
        own = self._own(range(first, end + 1, cell), chosen)
        if own is None:
            return None
        captures = self._optional(lease, [p for p in chosen if all(p != c.position for c in own)]) + own
        for capture in captures:
            if capture.slot is not None:
                self.cache.written_for[capture.slot] = capture.position
        return tuple(captures)

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

    def _own(self, positions: range, chosen: list[int]) -> list[Capture] | None:
        captures: list[Capture] = []
        if not self._has_states:
            return captures
        for position in positions:
            slot = self.cache.take(Kind.STATE)
            if slot is None:
                for capture in captures:
                    self.cache.release_slot(capture.slot)
                return None
            captures.append(Capture(position, slot, own=True, keep=position in chosen))
        return captures

    def _optional(self, lease: Lease, positions: list[int]) -> list[Capture]:
        """Snapshots for others: taken where there is room, else skipped and counted. Candidates come last."""
        captures, before = [], lease.miss.cached
        gaps = dict(zip(positions, (p - q for p, q in zip(positions, [lease.miss.cached, *positions]))))
        with_origin = [(position, self.origin(lease, position)) for position in positions]
        for position, origin in sorted(with_origin, key=lambda each: each[1] is Origin.CANDIDATE):
            slot = None
            if origin in self._on_trial and not self.cache.worth.popularity.worth_a_try(origin):
                continue
            if self._has_states:
                saved = gaps[position] if origin is Origin.CANDIDATE else position - before
                slot = self.cache.take_for(origin, max(self._cell, saved))
                if slot is None:
                    if origin is not Origin.CANDIDATE:
                        self.cache.skipped(lease.keys, position)
                    continue
            if origin is not Origin.CANDIDATE:
                before = position
            captures.append(Capture(position, slot, own=False, keep=True))
        return sorted(captures, key=lambda capture: capture.position)
