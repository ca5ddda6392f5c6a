"""The contents of memory as plain values for people and dashboards: counters, units in use, largest shared prefixes.

Reads, never changes. Prefixes appear as beginnings of their salted keys, with lengths and counts, so that no prompt can
be read from the report. Times are on the cache's own clock: the number of lookups so far.
"""

from __future__ import annotations

from collections import Counter
from heapq import nlargest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.ledger import Ledger
from weft.memory.misses import Reason, ranked_misses
from weft.memory.trie import Node

NAME_LETTERS = 16
MAX_PREFIXES = 1000
# Resume points listed for one prefix, deepest first.
MAX_POINTS = 32


def memory_stats(ledger: Ledger) -> dict[str, Any]:
    """Return counters and gauges for metrics."""
    counts, arena, trie = ledger.cache.counts, ledger.arena, ledger.cache.trie
    tiers = {} if ledger.tiers is None else {"tiers": ledger.tiers.stats()}
    return tiers | {
        "lookups": counts.lookups,
        "reusable_tokens": counts.tokens_asked,
        "cached_tokens": counts.tokens_cached,
        "resumed_tokens": counts.tokens_resumed,
        # All reasons, so that a series exists before its first event.
        "misses": {reason.value: counts.misses[reason] for reason in Reason},
        "lost_tokens": {reason.value: counts.tokens_lost[reason] for reason in Reason},
        "captures_kept": counts.captures_kept,
        "captures_skipped": counts.captures_skipped,
        "kept": {origin.value: counts.kept[origin] for origin in Origin},
        "candidates": _candidates(ledger),
        "hits": {origin.value: counts.hits[origin] for origin in Origin},
        "hit_tokens": {origin.value: counts.tokens_hit[origin] for origin in Origin},
        "evicted_pages": counts.evicted_pages,
        "evicted_points": counts.evicted_points,
        "units": units_in_use(ledger),
        "unit_bytes": {kind.value: size for kind, size in arena.unit_bytes.items()},
        "slabs": arena.slabs,
        "slabs_used": arena.used_slabs,
        "slab_bytes": arena.slab_bytes,
        "cells": len(trie),
        # Computed from counters, because counting nodes would delay a step.
        "resume_points": counts.captures_kept - counts.evicted_points,
        "leases": len(ledger.leases),
        "retained": ledger.retentions.stats(),
    }


def memory_load(ledger: Ledger) -> dict[str, Any]:
    """Return what a router weighs of an engine's memory."""
    arena = ledger.arena
    return {
        "used_memory": arena.used_slabs / arena.slabs,
        "memory_bytes": arena.slabs * arena.slab_bytes,
        "held_bytes": ledger.held_slabs() * arena.slab_bytes,
        "load_bytes_per_second": None if ledger.tiers is None else ledger.tiers.links[0].rates.load_bytes,
        "token_bytes": ledger.spec.page_bytes / ledger.cell,
        "point_bytes": ledger.cache.point_bytes,
    }


def _candidates(ledger: Ledger) -> dict[str, int]:
    """Return the number of candidates ever written, and of those that are still candidates."""
    counts, size = ledger.cache.counts, ledger.cache.point_bytes
    written, held = counts.candidates, counts.candidates_held
    return {"written": written, "written_bytes": written * size, "held": held, "held_bytes": held * size}


def units_in_use(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Return the units of each kind: `live` ones are held by a running sequence, `cached` ones by the cache alone."""
    held = {
        Kind.PAGE: lambda: _distinct([ledger.page_table[s, : lease.cells] for s, lease in ledger.leases.items()]),
        Kind.WINDOW: lambda: _distinct(
            [ledger.window_table[s, lease.window_first : lease.cells] for s, lease in ledger.leases.items()]
        ),
        Kind.STATE: lambda: _live_slots(ledger),
        Kind.TAIL: lambda: len(ledger.leases),
    }
    found = {}
    for kind in ledger.arena.unit_bytes:
        live = held[kind]()
        found[kind.value] = {"live": live, "cached": ledger.arena.used(kind) - live}
    return found


def _distinct(parts: list[NDArray[np.int32]]) -> int:
    return len(np.unique(np.concatenate(parts))) if parts else 0


def _live_slots(ledger: Ledger) -> int:
    slots: set[int | None] = {ledger.snapshots.reserve}
    for lease in ledger.leases.values():
        slots.add(lease.slot)
        for grant in lease.pending:
            slots.add(grant.read_slot)
            slots.update(capture.slot for capture in grant.captures)
    return len(slots - {None})


def cache_report(ledger: Ledger, limit: int) -> dict[str, Any]:
    """Return totals of the cache, and the `limit` prefixes that saved most, or would."""
    cache, cell = ledger.cache, ledger.spec.cell
    hits, sequences = _sums(list(cache.trie.nodes.values()))

    def worth(node: Node) -> tuple[int, int]:
        return hits[node] * node.depth, (sequences[node] - 1) * node.depth

    shared = [node for node in cache.trie.nodes.values() if node.children > 1 or node.hits]
    chosen = nlargest(max(0, min(limit, MAX_PREFIXES)), shared, key=worth)
    tiers = {} if ledger.tiers is None else {"tiers": ledger.tiers.stats()}
    return tiers | {
        "enabled": ledger.enabled,
        "cell_tokens": cell,
        "clock": cache.clock,
        "cached_tokens": len(cache.trie) * cell,
        "shared_prefixes": len(shared),
        "tenants": _tenants(ledger),
        "memory": _memory(ledger),
        "misses": ranked_misses(*(_by_name(each) for each in (cache.counts.misses, cache.counts.tokens_lost))),
        "prefixes": [_prefix(ledger, node, hits[node], sequences[node]) for node in chosen],
    }


def _tenants(ledger: Ledger) -> list[dict[str, Any]]:
    """Return the tokens of each tenant in all tiers, most first. A digest stands for a tenant in headers too."""
    found = ledger.tenancy.tokens((cache.trie for cache in ledger.caches), ledger.spec.cell)
    largest = nlargest(MAX_PREFIXES, found.items(), key=lambda each: each[1])
    return [{"digest": digest.hex(), "tokens": tokens} for digest, tokens in largest]


def _by_name(counted: Counter[Reason]) -> dict[str, int]:
    return {reason.value: counted[reason] for reason in Reason}


def _sums(nodes: list[Node]) -> tuple[Counter[Node], Counter[Node]]:
    """Return for every node how often a request resumed at or below it, and its number of different continuations."""
    hits: Counter[Node] = Counter()
    sequences: Counter[Node] = Counter()
    # Parents are always added before their children, so the reverse order has children first.
    for node in reversed(nodes):
        hits[node] += node.hits
        sequences[node] += node.children == 0
        if node.parent:
            hits[node.parent] += hits[node]
            sequences[node.parent] += sequences[node]
    return hits, sequences


def _memory(ledger: Ledger) -> dict[str, Any]:
    sizes = ledger.arena.unit_bytes
    kinds = {}
    for name, used in units_in_use(ledger).items():
        size = sizes[Kind(name)]
        kinds[name] = used | {"unit_bytes": size, "live_bytes": used["live"] * size}
        kinds[name]["cached_bytes"] = used["cached"] * size
    return {"limit_bytes": ledger.arena.slabs * ledger.arena.slab_bytes, "kinds": kinds}


def _prefix(ledger: Ledger, node: Node, hits: int, sequences: int) -> dict[str, Any]:
    cell, clock = ledger.spec.cell, ledger.cache.clock
    points = []
    above: Node | None = node
    while above:
        if above.resume:
            points.append(above.resume)
        above = above.parent
    states, windows = len(points), sum(len(point.window) for point in points)
    sizes = {Kind.PAGE: node.depth, Kind.STATE: states, Kind.WINDOW: windows}
    arena = ledger.arena.unit_bytes
    return {
        "name": node.key.hex()[:NAME_LETTERS],
        "tokens": node.depth * cell,
        "sequences": sequences,
        "children": node.children,
        "running": node.pins,
        "hits": hits,
        "saved_tokens": hits * node.depth * cell,
        "age": clock - node.used,
        "bytes": {kind.value: count * arena[kind] for kind, count in sizes.items() if kind in arena},
        "resume_point_count": states if ledger.cache.point_bytes else node.depth,
        "resume_points": [
            {"tokens": point.node.depth * cell, "hits": point.hits, "age": clock - point.used}
            for point in points[:MAX_POINTS]
        ],
    }
