"""Tiers of a simulated engine: the engine's own caches, links and policies, and copies that only take time.

Each link copies in both directions at its rates, one plan after the other. What an idle server writes ahead is not
simulated: a tier gets what the one above it is about to evict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction
from weft.memory.cache import Cache
from weft.memory.spec import MemorySpec
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.empty import empty_tier
from weft.memory.tiers.link import LowerTier
from weft.memory.tiers.tiers import Tiers
from weft.simulate.costs import TierRates


@dataclass(frozen=True, slots=True, eq=False)
class TimedCopy:
    """Copies that have landed at a time of the simulation's clock."""

    lands_at: float
    seconds: float


class TimedCopies:
    """The device's side of copies. The engine sets `now`."""

    def __init__(self, rates: dict[tuple[int, Direction], float]) -> None:
        self.now = 0.0
        self._rates = rates
        self._free_at = dict.fromkeys(rates, 0.0)
        self._under_way: dict[TimedCopy, None] = {}

    def copy(self, plan: CopyPlan) -> TimedCopy:
        place = plan.level, plan.direction
        seconds = plan.size_bytes / self._rates[place]
        self._free_at[place] = lands_at = max(self.now, self._free_at[place]) + seconds
        ticket = TimedCopy(lands_at, seconds)
        self._under_way[ticket] = None
        return ticket

    def copied(self, ticket: TimedCopy, wait: bool) -> float | None:
        if self.now < ticket.lands_at:
            return None
        self._under_way.pop(ticket, None)
        return ticket.seconds

    @property
    def next_landing(self) -> float | None:
        """When the first of the copies under way lands."""
        return min((ticket.lands_at for ticket in self._under_way), default=None)


def timed_tiers(
    spec: MemorySpec, config: EngineConfig, rates: TierRates
) -> tuple[Callable[[Cache, Tenancy], Tiers], TimedCopies] | None:
    """Return what makes the tiers that the configuration asks for, if any, and the device's side of their copies."""
    sizes = {"host": config.host_bytes, "disk": config.disk_bytes} if config.cache else {}
    names = [name for name, size in sizes.items() if size]
    if not names:
        return None
    each = {
        "host": {Direction.LOAD: rates.host, Direction.SAVE: rates.host},
        "disk": {Direction.LOAD: rates.disk_read, Direction.SAVE: rates.disk_write},
    }
    device = TimedCopies({(level, way): each[name][way] for level, name in enumerate(names) for way in Direction})

    def make(cache: Cache, tenancy: Tenancy) -> Tiers:
        lowers = {name: empty_tier(spec, sizes[name], config.eviction) for name in names}
        # As in the engine, the rate of a disk is measured by its first loads.
        known = {"host": rates.host}
        tiers = [LowerTier(name, each, known.get(name), weighs_copies=name == "host") for name, each in lowers.items()]
        return Tiers(cache, tiers, tenancy, clock=lambda: device.now)

    return make, device
