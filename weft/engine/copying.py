"""Runs the copies between tiers beside the steps: launches what the tiers plan, and lands what the device has copied.

No step waits for a copy. An engine with nothing else to do waits for one about a millisecond at a time, so that it
still sees new requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any

from weft.base.companions import Companion
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction, PlanCopies
from weft.base.errors import CopyFailed
from weft.engine.device import Device
from weft.memory.cache import Cache
from weft.memory.dropping import FlightMarks
from weft.memory.ledger import MakeTiers
from weft.memory.spec import MemorySpec
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.empty import empty_tier
from weft.memory.tiers.link import MOST_SAVING_BYTES, LowerTier
from weft.memory.tiers.tiers import Tiers

log = logging.getLogger("weft")

# A closing engine saves what was kept for up to this time. Servers kill an engine that does not end within ten seconds.
CLOSING_SECONDS = 6.0
# How long an engine with nothing else to do waits for answers of a remote store at a time.
ANSWER_SECONDS = 1e-3


def tiers_below(
    spec: MemorySpec, config: EngineConfig, device: Device, now: Callable[[], float] = monotonic
) -> MakeTiers | None:
    """Return what makes the tiers below the device that the configuration asks for; `device` makes their copies."""
    if not config.cache or not (config.host_bytes or config.disk_bytes or config.remote or config.arrivals_bytes):
        return None
    copies = device.capabilities.tiers
    assert copies is not None, "a device has the tiers below it that its engine uses"

    def make(cache: Cache, tenancy: Tenancy) -> Tiers:
        tiers: list[LowerTier] = []
        memory, arrivals = cache, None
        if config.host_bytes:
            memory = empty_tier(spec, config.host_bytes, config.eviction)
            tiers.append(LowerTier("host", memory, copies.load_bytes_per_second, weighs_copies=True))
        if config.disk_bytes:
            from weft.memory.tiers.disk.restoring import Restoring
            from weft.memory.tiers.disk.tier import disk_cache

            disk = disk_cache(spec, copies.disk, config.eviction)
            tiers.append(LowerTier("disk", disk, labelled=True, restoring=Restoring(disk, copies.disk, tenancy)))
        if config.remote:
            from weft.memory.tiers.remote.discovery import Discovery
            from weft.memory.tiers.remote.tier import view_bytes

            view, store = empty_tier(spec, view_bytes(spec), config.eviction), copies.remote
            discovery = Discovery(view, store.store, store.names, tenancy)
            # Saves to a store that hangs hold memory until they fail.
            most = min(MOST_SAVING_BYTES, memory.arena.slabs * memory.arena.slab_bytes // 8)
            tiers.append(LowerTier("remote", view, labelled=True, discovery=discovery, most_saving_bytes=most))
        if config.arrivals_bytes:
            # In transit: what came first goes first.
            arrivals = empty_tier(spec, config.arrivals_bytes, "lru", "arrivals")
        return Tiers(cache, tiers, tenancy, arrivals, now)

    return make


class Copier(Companion):
    """`now` is a clock in seconds: a closing engine saves for up to `closing_seconds`."""

    def __init__(
        self,
        tiers: Tiers,
        copies: PlanCopies,
        now: Callable[[], float] = perf_counter,
        closing_seconds: float = CLOSING_SECONDS,
    ) -> None:
        self.tiers = tiers
        self._copies = copies
        self._now = now
        self._closing_seconds = closing_seconds
        self._flights: dict[tuple[int, Direction], deque[tuple[CopyPlan, Any]]] = {
            (link.level, each): deque() for each in (Direction.LOAD, Direction.SAVE) for link in tiers.links
        }
        self._landed: FlightMarks = dict.fromkeys(self._flights, 0)

    @property
    def busy(self) -> bool:
        return self.tiers.busy

    def land(self, wait: bool = False) -> None:
        """Publish copies that have landed. With `wait`, give the oldest one a little time, a load if there is one."""
        for flights in self._flights.values():
            while flights and self._land_oldest(flights, wait):
                wait = False
            wait = wait and not flights

    def launch(self, idle: bool = False) -> None:
        """Begin the next copies: loads, and saves of what will be evicted next; if `idle`, of anything worth it."""
        self.tiers.restore_some()
        self.launch_loads()
        for plan in self.tiers.plan_saves(idle):
            self._begin(plan)

    def launch_loads(self) -> None:
        """Begin the next loads."""
        for plan in self.tiers.plan_loads():
            self._begin(plan)

    def attend(self, idle: bool) -> None:
        """Begin the loads that the plan asked for. If `idle`, give copies a little time to land."""
        self.launch_loads()
        if idle:
            self.land(wait=True)
            if not any(self._flights.values()):
                self.tiers.await_answers(ANSWER_SECONDS)

    def _begin(self, plan: CopyPlan) -> None:
        self._flights[plan.level, plan.direction].append((plan, self._copies.copy(plan)))

    def marks(self) -> FlightMarks:
        """Return a mark behind the flights that are under way."""
        return {each: self._landed[each] + len(flights) for each, flights in self._flights.items()}

    def has_passed(self, marks: FlightMarks) -> bool:
        """Return whether all flights before a mark have landed."""
        return all(self._landed[each] >= count for each, count in marks.items())

    def finish(self) -> None:
        """Make all copies that were begun. Steps wait meanwhile."""
        while self.busy:
            self.launch_loads()
            for plan in self.tiers.plan_begun():
                self._begin(plan)
            self.land(wait=True)

    def close(self) -> None:
        """Save what outlives the process, newest first and for a limited time."""
        until = self._now() + self._closing_seconds
        for link in self.tiers.links:
            link.saves.erasing.retry()
        while (self.busy or self.tiers.behind) and self._now() < until:
            self.launch(idle=True)
            self.land(wait=True)
        for link in self.tiers.links:
            # The next process continues, from the marks in the file. What is not marked yet still is, however long
            # that takes: it would be served.
            link.saves.erasing.stop()
        self.finish()

    def _land_oldest(self, flights: deque[tuple[CopyPlan, Any]], wait: bool) -> bool:
        plan, ticket = flights[0]
        place = plan.level, plan.direction
        try:
            seconds = self._copies.copied(ticket, wait)
        except CopyFailed as error:
            log.warning("a copy between tiers failed: %s", error)
            flights.popleft()
            self._landed[place] += 1
            self.tiers.failed(plan)
            return True
        if seconds is None:
            return False
        flights.popleft()
        self._landed[place] += 1
        self.tiers.landed(plan, seconds)
        return True
