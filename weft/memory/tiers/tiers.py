"""The tiers below the device's memory, seen from the ledger: what to save, what to bring back, and how much of it.

A tier is a `Cache` with an arena of its own, so that one policy values all of them. Each holds whole paths from the
root: a lookup combines the pages of one tier with the resume point of another.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

from weft.base.copies import CopyPlan, Direction
from weft.base.errors import InvalidOption, OptionError
from weft.base.grid import floor_to_grid
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.misses import Miss, Reason
from weft.memory.spec import MemorySpec
from weft.memory.tiers.loads import Loads
from weft.memory.tiers.rates import Rates
from weft.memory.tiers.saves import Saves
from weft.memory.trie import Node, resume_at_or_above

# Loads go first: a request waits for them. At 50 GB/s these are 10 and 2 milliseconds.
MOST_LOADING_BYTES = 512 << 20
MOST_SAVING_BYTES = 128 << 20
CHUNK_BYTES = 64 << 20
# A request whose loaded prefix was evicted again before it could start is computed after this many loads.
MOST_LOADS = 2
# First cells whose tenant is remembered until their paths are saved.
MOST_TENANTS = 1 << 16
TENANT_BYTES = 16
KEY_SALT_BYTES = 32


def empty_tier(spec: MemorySpec, size_bytes: int, eviction: str) -> Cache:
    """Return an empty tier of this size. Tails are private to running sequences, so it has none."""
    sizes: dict[Kind, int] = {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL}
    try:
        return Cache(spec, Arena(sizes, size_bytes), eviction)
    except OptionError as error:
        least = sum(sizes.values())
        raise InvalidOption(
            "host_memory", f"is {size_bytes} bytes, too small for a state and a page of this model ({least} bytes)"
        ) from error


def tenant_digest(salt: bytes) -> bytes:
    """Return what a header says of the tenant: enough to drop its units, not enough to learn its salt.

    A salt begins with the 32 bytes of an API key's; a request's own `cache_salt` follows, for the same tenant.
    """
    return sha256(b"weft tenant " + salt[:KEY_SALT_BYTES]).digest()[:TENANT_BYTES]


class Tiers:
    """A tier below `upper`, the device's memory. `waiter` is the number of a request in the queue.

    `labelled`: the lower tier outlives the process, and its plans say what each unit is.
    """

    def __init__(
        self, upper: Cache, lower: Cache, rates: Rates, chunk_bytes: int = CHUNK_BYTES, labelled: bool = False
    ) -> None:
        self.upper = upper
        self.lower = lower
        self.rates = rates
        self.name = "disk" if labelled else "host"
        self.saves = Saves(upper, lower, chunk_bytes, MOST_SAVING_BYTES)
        self.loads = Loads(upper, lower, chunk_bytes, MOST_LOADING_BYTES)
        self.saves.labelled = self.loads.labelled = labelled
        self.loaded_tokens = 0
        self.seconds = dict.fromkeys(Direction, 0.0)
        self.slower = 0
        self.failures = 0
        # By request: how many loads it has waited for, and the interval of tokens that the last one brought.
        self._tried: dict[int, int] = {}
        self._brought: dict[int, tuple[int, int]] = {}

    @property
    def in_flight(self) -> int:
        """Number of copies that hold memory until they land."""
        return self.saves.in_flight + self.loads.in_flight

    @property
    def busy(self) -> bool:
        return bool(self.in_flight or self.saves.waiting or self.loads.waiting)

    # copies ---------------------------------------------------------------------------------------------------------

    def plan(self) -> CopyPlan | None:
        """Return the next copies. A device that has begun them reports their landing in this order, by direction."""
        return self.loads.plan() or self.saves.plan()

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
        copies = self.saves if plan.direction is Direction.SAVE else self.loads
        copies.failed()
        self.failures += 1

    # requests -------------------------------------------------------------------------------------------------------

    def bring(self, waiter: int, keys: list[Key], limit: int, match: Miss) -> bool:
        """Return whether a request should wait, because more of its prefix than `match` is on its way up."""
        if self.loads.awaited_by(waiter):
            return True
        source = self._deeper(keys, limit, match)
        if source is None or self._tried.get(waiter, 0) >= MOST_LOADS or not self._pays(source, match):
            return False
        self.loads.begin(waiter, keys, match.kv_matched // self.upper.cell, source)
        self._tried[waiter] = self._tried.get(waiter, 0) + 1
        self._brought[waiter] = (match.cached, source.depth * self.upper.cell)
        return True

    def _deeper(self, keys: list[Key], limit: int, match: Miss) -> Node | None:
        """Return the deepest place in the lower tier to resume from, if it is deeper than the device's."""
        cell = self.upper.cell
        reusable = keys[: floor_to_grid(limit, cell) // cell]
        if self.loads.damaged:
            bad = (depth for depth, key in enumerate(reusable) if key in self.loads.damaged)
            reusable = reusable[: next(bad, len(reusable))]
        node = self.lower.trie.deepest(reusable)
        if self.lower.point_bytes:
            point = resume_at_or_above(node)
            node = None if point is None else point.node
        return node if node is not None and node.depth * cell > match.cached else None

    def _pays(self, source: Node, match: Miss) -> bool:
        cell = self.upper.cell
        size = self.loads.size_bytes(match.kv_matched // cell, source.depth)
        return self.rates.load_pays(size, self.loads.queued_bytes, source.depth * cell - match.cached)

    def explain(self, keys: list[Key], limit: int, miss: Miss) -> Miss:
        """Return the miss with its reason, if the lower tier has more than the request starts from."""
        source = self._deeper(keys, limit, miss)
        if source is None:
            return miss
        slower = not self._pays(source, miss)
        self.slower += slower
        there = Reason.IN_DISK if self.name == "disk" else Reason.IN_HOST
        return replace(miss, reason=Reason.LOAD_SLOWER if slower else there)

    def leave(self, waiter: int, cached: int = 0) -> int:
        """Forget a request that has started with `cached` tokens, or ended; return how many of them were loaded."""
        self.loads.leave(waiter)
        self._tried.pop(waiter, None)
        first, end = self._brought.pop(waiter, (0, 0))
        loaded = max(0, min(cached, end) - first)
        self.loaded_tokens += loaded
        return loaded

    # what the device keeps ------------------------------------------------------------------------------------------

    def opened(self, keys: list[Key], limit: int, node: Node | None) -> None:
        """Record a lookup: what it started from is worth keeping here too."""
        self.lower.looked_up(None, keys, self.lower.match(keys, limit))
        if node is None:
            return
        self.saves.offer(node.key)
        known = self.lower.trie.nodes.get(node.key)
        if known is not None:
            self.lower.touch(known)

    def belongs(self, keys: list[Key], salt: bytes) -> None:
        """Record the tenant of a request, by its first cell, for the headers of a tier that outlives the process."""
        if not self.saves.labelled or not keys or keys[0] in self.saves.tenants:
            return
        if len(self.saves.tenants) >= MOST_TENANTS:
            self.saves.tenants.pop(next(iter(self.saves.tenants)))
        self.saves.tenants[keys[0]] = tenant_digest(salt)

    def kept(self, key: Key) -> None:
        """Save a path that the device has just kept, with its resume point."""
        self.saves.offer(key)

    def clear(self) -> None:
        """Drop everything that no copy uses."""
        self.lower.clear()
        self.saves.forget()

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges for metrics."""
        arena = self.lower.arena
        return {
            self.name: {
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
                "failures": self.failures,
                "cancelled_loads": self.loads.cancelled,
                "load_bytes_per_second": self.rates.load_bytes or 0.0,
                "prefill_tokens_per_second": self.rates.prefill_tokens or 0.0,
            }
        }
