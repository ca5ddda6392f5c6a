"""Two neighbouring tiers and the copies between them: what is saved to the lower one, what is loaded from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.base.copies import CopyPlan, Direction
from weft.base.grid import floor_to_grid
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tiers.demotion import Demotion
from weft.memory.tiers.loads import Loads
from weft.memory.tiers.rates import Rates
from weft.memory.tiers.saves import Saves
from weft.memory.trie import Node, resume_at_or_above

if TYPE_CHECKING:
    from weft.memory.tiers.disk.restoring import Restoring
    from weft.memory.tiers.remote.discovery import Discovery

# Bytes under way in each direction: 10 milliseconds at the 50 GB/s between a GPU and host memory. Of what is saved to a
# file or a store, which are slower, half as much.
MOST_LOADING_BYTES = 512 << 20
MOST_DEMOTING_BYTES = 512 << 20
MOST_SAVING_BYTES = 256 << 20
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier to put below another one, and what is known of the copies between them.

    `load_bytes` is the rate of loads in bytes per second, if it was measured. `labelled`: the tier outlives the
    process, and plans say what each unit is. `weighs_copies`: what is seldom wanted is copied if that pays.
    """

    name: str
    cache: Cache
    load_bytes: float | None = None
    labelled: bool = False
    weighs_copies: bool = False
    # Units of a file that are still to be entered.
    restoring: Restoring | None = None
    # Asks what a remote store has; its objects are dropped, not overwritten.
    discovery: Discovery | None = None
    most_saving_bytes: int = MOST_SAVING_BYTES


class TierLink:
    """`level` counts links from the device down: copies of link 0 are between the device and the tier below it.

    `writes_behind`: what the upper tier keeps is also saved while the engine is idle. `follows`: another link decides
    what is saved, and when. `saved` is called with the key of a path whose copies have ended; `tenant_of` returns the
    digest of a cell's tenant.
    """

    # Whether what the lower tier has is on its way to a request.
    transient = False

    def __init__(
        self,
        level: int,
        upper: Cache,
        tier: LowerTier,
        tenant_of: Callable[[Node], bytes],
        writes_behind: bool = False,
        follows: bool = False,
        saved: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self.level = level
        self.name = tier.name
        self.upper = upper
        self.lower = lower = tier.cache
        self.rates = Rates(tier.load_bytes)
        most = tier.most_saving_bytes if tier.labelled else MOST_DEMOTING_BYTES
        self.saves = Saves(upper, lower, min(CHUNK_BYTES, most), most, tier.labelled, tenant_of, saved)
        self.loads = Loads(
            upper,
            lower,
            CHUNK_BYTES,
            MOST_LOADING_BYTES,
            self.saves.damaged,
            tier.labelled,
            tenant_of,
            lambda: self.saves.in_flight > 0,
        )
        self.demotion = Demotion(upper, self.saves, self.rates.copy_pays if tier.weighs_copies else None, follows)
        self.writes_behind = writes_behind
        self.restoring = tier.restoring
        if tier.restoring is not None:
            self.saves.erasing.resume(tier.restoring.doomed)
        self.discovery = tier.discovery
        self.loaded_tokens = 0
        self.failures = 0
        self.seconds = dict.fromkeys(Direction, 0.0)

    @property
    def in_flight(self) -> int:
        """Number of copies that hold memory until they land."""
        return self.saves.in_flight + self.loads.in_flight

    @property
    def busy(self) -> bool:
        return bool(self.in_flight or self.saves.waiting or self.loads.waiting)

    def under_way(self) -> Iterable[Key]:
        """Return the cells that will be published in the lower tier."""
        return self.saves.under_way

    @property
    def moving(self) -> bool:
        """Whether paths are on their way up or down."""
        return bool(self.saves.moving or self.loads.in_flight or self.loads.waiting)

    # copies ---------------------------------------------------------------------------------------------------------

    def plan_load(self) -> CopyPlan | None:
        """Return the next copies to the upper tier."""
        plan = self.loads.plan()
        return None if plan is None else replace(plan, level=self.level)

    def plan_save(self, idle: bool = False) -> CopyPlan | None:
        """Return the next copies to the lower tier: of what is evicted next, and if `idle`, of what was kept."""
        more = self.demotion.demote
        if idle or self.demotion.follows:
            more = self.demotion.write_behind if self.writes_behind else lambda: False
        plan = self.saves.plan(more)
        return None if plan is None else replace(plan, level=self.level)

    def plan_begun(self) -> CopyPlan | None:
        """Return the next copies of paths whose saves were begun."""
        plan = self.saves.plan(lambda: False)
        return None if plan is None else replace(plan, level=self.level)

    def landed(self, plan: CopyPlan, seconds: float) -> None:
        """Publish what a plan has copied."""
        self.seconds[plan.direction] += seconds
        if plan.direction is Direction.SAVE:
            self.saves.landed()
        else:
            self.rates.loaded(plan.size_bytes, seconds)
            self.loads.landed()

    def failed(self, plan: CopyPlan) -> None:
        """Give up what a plan could not copy."""
        if plan.direction is Direction.SAVE:
            self.saves.failed(plan)
        else:
            self.loads.failed()
        self.failures += 1

    @property
    def overwrites(self) -> bool:
        """Whether dropped units of the lower tier are overwritten."""
        return self.saves.labelled and self.discovery is None

    def abandon(self) -> None:
        """Give up the copies in both directions. Units that a lasting tier frees because of it are erased."""
        self.saves.abandon()
        self.loads.abandon()
        if self.overwrites:
            self.saves.erasing.take_when_freed([*self.saves.under_copy(lower=True), *self.loads.held(lower=True)])

    def restore_some(self, most: int) -> None:
        """Enter a part of what the lower tier's file holds."""
        if self.restoring is not None and not self.restoring.enter_some(most):
            self.restoring = None
        if self.discovery is not None:
            self.discovery.progress()

    def own_units(self) -> Iterable[tuple[Kind, int]]:
        """Return the units of the lower tier that the link owns besides its copies."""
        return ()

    def own_pins(self) -> list[Node]:
        """Return the cells of the lower tier that the link protects besides its copies."""
        return []

    # lookups --------------------------------------------------------------------------------------------------------

    def deepest(self, keys: list[Key], limit: int) -> Node | None:
        """Return the deepest place in the lower tier to resume from."""
        if self.restoring is not None:
            self.restoring.enter_path(keys)
        reusable = keys[: floor_to_grid(limit, self.lower.cell) // self.lower.cell]
        damaged = self.saves.damaged
        if damaged:
            bad = (depth for depth, key in enumerate(reusable) if key in damaged)
            reusable = reusable[: next(bad, len(reusable))]
        node = self.lower.trie.deepest(reusable)
        if self.lower.point_bytes:
            point = resume_at_or_above(node)
            return None if point is None else point.node
        return node

    def load_bytes(self, keys: list[Key], source: Node) -> int:
        """Return the bytes to load so that the upper tier has the path to `source`."""
        known = self.upper.trie.nodes.get(source.key)
        if known is not None and (known.resume is not None or not self.upper.point_bytes):
            return 0
        matched = self.upper.trie.deepest(keys[: source.depth])
        return self.loads.size_bytes(0 if matched is None else matched.depth, source.depth)

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges of the lower tier for metrics."""
        arena = self.lower.arena
        return {
            "limit_bytes": arena.slabs * arena.slab_bytes,
            "used_bytes": sum(arena.used(kind) * size for kind, size in arena.unit_bytes.items()),
            "cells": len(self.lower.trie),
            "resume_points": self.lower.points,
            "evicted_pages": self.lower.counts.evicted_pages,
            "evicted_points": self.lower.counts.evicted_points,
            "saved_bytes": self.saves.bytes,
            "loaded_bytes": self.loads.bytes,
            "saved_seconds": self.seconds[Direction.SAVE],
            "loaded_seconds": self.seconds[Direction.LOAD],
            "loaded_tokens": self.loaded_tokens,
            "unsaved": self.saves.dropped,
            "unworthy": self.demotion.unworthy,
            "failures": self.failures,
            "cancelled_loads": self.loads.cancelled,
            "erasing_bytes": self.saves.erasing.left_bytes,
            "load_bytes_per_second": self.rates.load_bytes or 0.0,
            "prefill_tokens_per_second": self.rates.prefill_tokens or 0.0,
        }
