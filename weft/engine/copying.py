"""Runs the copies between tiers beside the steps: launches what the tiers plan, and lands what the device has copied.

No step waits for a copy. An engine with nothing else to do waits for one about a millisecond at a time, so that it
still sees new requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction
from weft.base.errors import CopyFailed, EngineStopped
from weft.engine.device import Device, DeviceTiers
from weft.memory.ledger import Ledger
from weft.memory.tiers.empty import empty_tier
from weft.memory.tiers.exchange.arrivals import ArrivalsLink
from weft.memory.tiers.link import MOST_SAVING_BYTES, TierLink
from weft.memory.tiers.tiers import Tiers

log = logging.getLogger("weft")

# A closing engine saves what was kept for up to this time. Servers kill an engine that does not end within ten seconds.
CLOSING_SECONDS = 6.0


# How long an engine with nothing else to do waits for answers of a remote store at a time.
ANSWER_SECONDS = 1e-3
# Numbers of flights that were launched before a moment, by link and direction.
FlightMarks = dict[tuple[int, Direction], int]


class Copier:
    def __init__(self, tiers: Tiers, copies: DeviceTiers) -> None:
        self.tiers = tiers
        self._copies = copies
        self._flights: dict[tuple[int, Direction], deque[tuple[CopyPlan, Any]]] = {
            (link.level, each): deque() for each in (Direction.LOAD, Direction.SAVE) for link in tiers.links
        }
        self._landed: FlightMarks = dict.fromkeys(self._flights, 0)

    @classmethod
    def attach(cls, ledger: Ledger, device: Device, config: EngineConfig) -> Copier:
        """Give a ledger the tiers below the device that the configuration asks for; `device` makes the copies."""
        copying = device.capabilities.tiers
        assert copying is not None, "a device has the tiers below it that its engine uses"
        links: list[TierLink] = []
        upper = ledger.cache
        if config.host_bytes:
            host = empty_tier(ledger.spec, config.host_bytes, config.eviction)
            links.append(TierLink(0, "host", upper, host, copying.load_bytes_per_second))
            links[0].demotion.copy_pays = links[0].rates.copy_pays
            upper = host
        if config.disk_bytes:
            from weft.memory.tiers.disk.restoring import Restoring
            from weft.memory.tiers.disk.tier import disk_cache

            disk = disk_cache(ledger.spec, copying.disk, config.eviction)
            links.append(TierLink(len(links), "disk", upper, disk, None, labelled=True))
            links[-1].restoring = restoring = Restoring(disk, copying.disk, ledger.tenancy)
            links[-1].saves.erasing.resume(restoring.doomed)
        if config.remote:
            from weft.memory.tiers.remote.discovery import Discovery
            from weft.memory.tiers.remote.tier import view_bytes

            view, copies = empty_tier(ledger.spec, view_bytes(ledger.spec), config.eviction), copying.remote
            links.append(TierLink(len(links), "remote", upper, view, None, labelled=True))
            links[-1].discovery = Discovery(view, copies.store, copies.names, ledger.tenancy)
            # Saves to a store that hangs hold memory until they fail.
            saves, arena = links[-1].saves, upper.arena
            saves.most_bytes = min(MOST_SAVING_BYTES, arena.slabs * arena.slab_bytes // 8)
            saves.chunk_bytes = min(saves.chunk_bytes, saves.most_bytes)
        if config.arrivals_bytes:
            # In transit: what came first goes first.
            arrivals = empty_tier(ledger.spec, config.arrivals_bytes, "lru", "arrivals")
            links.append(ArrivalsLink(len(links), ledger.cache, arrivals, ledger.tenancy))
        ledger.tiers = Tiers(links, ledger.tenancy)
        return cls(ledger.tiers, copying)

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

    def launch_loads(self, wait: bool = False) -> None:
        """Begin the next loads. With `wait`, because no step is under way, give copies a little time to land."""
        for plan in self.tiers.plan_loads():
            self._begin(plan)
        if wait:
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

    def close(self, finish_drops: Callable[[], None]) -> None:
        """Save what outlives the process, newest first and for a limited time, and close the tiers."""
        try:
            finish_drops()
            self._save_last()
        except EngineStopped as error:
            log.warning("what was not saved yet is lost: %s", error)
        finally:
            self.tiers.close()

    def _save_last(self) -> None:
        until = perf_counter() + CLOSING_SECONDS
        for link in self.tiers.links:
            link.saves.erasing.retry()
        while (self.busy or self.tiers.behind) and perf_counter() < until:
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
