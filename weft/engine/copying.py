"""Runs the copies between tiers beside the steps: launches what the tiers plan, and lands what the device has copied.

No step waits for a copy. Only an engine with nothing else to do waits, for the oldest one.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, cast

from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction
from weft.base.errors import CopyFailed
from weft.engine.device import CopyingDevice, Device
from weft.memory.ledger import Ledger
from weft.memory.tiers.rates import Rates
from weft.memory.tiers.tiers import Tiers, empty_tier

log = logging.getLogger("weft")

# Plans of copies launched in one step.
MOST_PLANS = 16


class Copier:
    def __init__(self, tiers: Tiers, device: CopyingDevice) -> None:
        self.tiers = tiers
        self._device = device
        self._flights: dict[Direction, deque[tuple[CopyPlan, Any]]] = {each: deque() for each in Direction}

    @classmethod
    def attach(cls, ledger: Ledger, device: Device, config: EngineConfig, rates: Rates) -> Copier:
        """Give a ledger the tier below the device that the configuration asks for; `device` makes the copies."""
        copying = cast(CopyingDevice, device)
        rates.load_bytes = copying.load_bytes_per_second
        if config.host_bytes:
            lower = empty_tier(ledger.spec, config.host_bytes, config.eviction)
        else:
            from weft.memory.tiers.disk_tier import disk_cache

            lower = disk_cache(ledger.spec, copying.disk, config.eviction)
        ledger.tiers = Tiers(ledger.cache, lower, rates, labelled=not config.host_bytes)
        return cls(ledger.tiers, copying)

    @property
    def busy(self) -> bool:
        return self.tiers.busy

    def land(self, wait: bool = False) -> None:
        """Publish copies that have landed; with `wait`, at least one, a load if there is one."""
        for direction in (Direction.LOAD, Direction.SAVE):
            flights = self._flights[direction]
            while flights and self._land_oldest(flights, wait):
                wait = False

    def close(self) -> None:
        """Make the copies that are still to be made, and release the tier below."""
        while self.busy:
            self.launch(stepping=False)
        self._device.close()

    def _land_oldest(self, flights: deque[tuple[CopyPlan, Any]], wait: bool) -> bool:
        plan, ticket = flights[0]
        try:
            seconds = self._device.copied(ticket, wait)
        except CopyFailed as error:
            log.warning("a copy between tiers failed: %s", error)
            flights.popleft()
            self.tiers.failed(plan)
            return True
        if seconds is None:
            return False
        flights.popleft()
        self.tiers.landed(plan, seconds)
        return True

    def launch(self, stepping: bool) -> None:
        """Begin the next copies. Without a step to follow, wait for the oldest one: nothing else can happen."""
        for _ in range(MOST_PLANS):
            plan = self.tiers.plan()
            if plan is None:
                break
            self._flights[plan.direction].append((plan, self._device.copy(plan)))
        if not stepping:
            self.land(wait=True)
