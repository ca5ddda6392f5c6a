"""Copies between a GPU's memory and a file or a store, through a little pinned memory.

Threads cannot read or write a GPU's memory. Where no tier of host memory lies in between, each plan passes through one
of a few slots: a save is copied to its slot, then written from there; a load is read into its slot, then copied. Plans
wait for a free slot in the order of their launch.

No torch: `host` makes the copies between the device and the slots, `inner` those between the slots and the tier below.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from weft.base.copies import CopyPlan, Direction, PlanCopies, TierCopies, UnitCopy
from weft.base.errors import CopyFailed
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.memory.tiers.link import CHUNK_BYTES

# For each direction: one is copied while the other is read or written.
SLOTS = 2


def slot_bytes(spec: MemorySpec, sizes: Mapping[Kind, int], chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the size of a slot: a plan may exceed a chunk by a resume point and a page."""
    window = spec.window_cells * sizes.get(Kind.WINDOW, 0)
    # Units of a kind lie at multiples of their size.
    return chunk_bytes + window + 2 * sum(size for kind, size in sizes.items() if kind is not Kind.TAIL)


@dataclass(slots=True, eq=False)
class StagedFlight:
    """The copies of one plan. `halves` are still to be begun."""

    plan: CopyPlan
    halves: list[tuple[PlanCopies, CopyPlan]] | None = None  # None: it waits for a slot
    under_way: tuple[PlanCopies, Any] | None = None
    slot: int | None = None
    seconds: float = 0.0
    error: CopyFailed | None = None

    @property
    def ended(self) -> bool:
        return self.error is not None or (self.halves == [] and self.under_way is None)


class StagedCopies:
    """`host` is memory for `2 * SLOTS` slots. One thread may begin copies while another asks for their end."""

    def __init__(self, host: PlanCopies, inner: TierCopies, sizes: Mapping[Kind, int], slot_bytes: int) -> None:
        self._inner = inner
        # Measured by the first loads.
        self.load_bytes_per_second: float | None = None
        self._host = host
        self._sizes = sizes
        self._slot_bytes = slot_bytes
        # Guards the queues, the slots and the flights.
        self._moving = threading.Lock()
        self._queues: dict[Direction, deque[StagedFlight]] = {each: deque() for each in Direction}
        self._free = {each: [place * SLOTS + slot for slot in range(SLOTS)] for place, each in enumerate(Direction)}

    def copy(self, plan: CopyPlan) -> StagedFlight:
        """Begin the copies of a plan, or let it wait for a slot."""
        flight = StagedFlight(plan)
        with self._moving:
            self._queues[plan.direction].append(flight)
            self._progress(plan.direction)
        return flight

    def copied(self, flight: StagedFlight, wait: bool) -> float | None:
        """Return the seconds that the copies took, or None if under way; with `wait`, wait a little for them.

        It may be asked again after the end: a group asks until all ranks have made their copies.
        """
        if wait:
            self._await(flight)
        queue = self._queues[flight.plan.direction]
        with self._moving:
            self._progress(flight.plan.direction)
            if not flight.ended:
                return None
            with suppress(ValueError):
                queue.remove(flight)
        if flight.error is not None:
            raise flight.error
        return flight.seconds

    def _await(self, flight: StagedFlight) -> None:
        """Wait a little for a half that is under way, without the lock: a thread may begin a copy meanwhile."""
        under_way = flight.under_way
        if under_way is not None:
            copies, ticket = under_way
            with suppress(CopyFailed):
                copies.copied(ticket, True)

    def close(self) -> None:
        self._inner.close()

    def _progress(self, direction: Direction) -> None:
        """Move all plans of a direction on. Their second halves begin in order, so that writes keep theirs."""
        in_order = True
        for flight in self._queues[direction]:
            if flight.halves is None and not self._enter(flight):
                return
            self._poll(flight)
            while not flight.ended and flight.under_way is None and (in_order or len(flight.halves or ()) == 2):
                copies, plan = (flight.halves or []).pop(0)
                flight.under_way = copies, copies.copy(plan)
                self._poll(flight)
            in_order = in_order and not flight.halves

    def _enter(self, flight: StagedFlight) -> bool:
        """Give a plan a slot, if there is one and it needs one."""
        plan = flight.plan
        if not plan.units:
            flight.halves = [(self._inner, plan)]
            return True
        if not self._free[plan.direction]:
            return False
        flight.slot = self._free[plan.direction].pop()
        staged = self._place(flight.slot, plan)
        upper = tuple(UnitCopy(unit.kind, unit.upper, place) for unit, place in zip(plan.units, staged, strict=True))
        lower = tuple(UnitCopy(unit.kind, place, unit.lower) for unit, place in zip(plan.units, staged, strict=True))
        halves = [(self._host, replace(plan, units=upper, level=0)), (self._inner, replace(plan, units=lower))]
        flight.halves = halves if plan.direction is Direction.SAVE else halves[::-1]
        return True

    def _place(self, slot: int, plan: CopyPlan) -> list[int]:
        """Return where the units of a plan lie in host memory, as indices of their kind."""
        place, end = slot * self._slot_bytes, (slot + 1) * self._slot_bytes
        found = [0] * len(plan.units)
        # Kind by kind: where it changes, bytes are left out.
        for index, unit in sorted(enumerate(plan.units), key=lambda each: each[1].kind):
            size = self._sizes[Kind(unit.kind)]
            found[index] = -(-place // size)
            place = (found[index] + 1) * size
        assert place <= end, "a plan must fit into a slot"
        return found

    def _poll(self, flight: StagedFlight) -> None:
        if flight.under_way is None:
            return
        copies, ticket = flight.under_way
        try:
            seconds = copies.copied(ticket, False)
        except CopyFailed as error:
            flight.error, flight.halves, flight.under_way = error, [], None
        else:
            if seconds is None:
                return
            flight.seconds += seconds
            flight.under_way = None
        if flight.ended and flight.slot is not None:
            self._free[flight.plan.direction].append(flight.slot)
            flight.slot = None
