"""The newest cells of every tier as branches on an axis of tokens, for a picture of the cache.

Bounded: asking for it takes the engine a few milliseconds, whatever the cache holds. A branch is a run of cells up to
the next fork or end. It is named by the beginning of its last cell's salted key, so no prompt can be read from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.ledger import Ledger
from weft.memory.tenancy import NO_TENANT, Tenancy
from weft.memory.trie import Node

# Of each tier: cells that are looked at, newest first, and branches and resume points that are reported.
MOST_CELLS = 8192
MOST_BRANCHES = 1024
MOST_POINTS = 2048
NAME_LETTERS = 16


def outline(ledger: Ledger, most_cells: int = MOST_CELLS) -> dict[str, Any]:
    """Return the branches of all tiers, and how many of their cells were looked at."""
    branches: list[dict[str, Any]] = []
    cells: dict[str, dict[str, int]] = {}
    for name, cache in zip(ledger.tier_names, ledger.caches):
        found = _Outline(cache, ledger.tenancy, most_cells, ledger.retentions.seconds_left(cache))
        branches += [branch | {"tier": name} for branch in found.branches()]
        cells[name] = {"held": len(cache.trie), "shown": len(found.seen)}
    return {"cell_tokens": ledger.cell, "clock": ledger.cache.clock, "cells": cells, "branches": branches}


@dataclass
class _Outline:
    """The outline of one tier. `seen` has all cells below each of its cells: a cell is newer than those above it."""

    cache: Cache
    tenancy: Tenancy
    most_cells: int
    retained: dict[Key, float]
    seen: set[Key] = field(default_factory=set)
    _digests: dict[Key, str | None] = field(default_factory=dict)
    _climbs: int = 0
    _points: int = 0

    def branches(self) -> list[dict[str, Any]]:
        newest: list[Node] = []
        node = self.cache.trie.newest
        while node is not None and len(newest) < self.most_cells:
            newest.append(node)
            node = node.older
        self.seen.update(node.key for node in newest)
        ends = [node for node in newest if node.children != 1][:MOST_BRANCHES]
        return [self._branch(node) for node in ends]

    def _branch(self, end: Node) -> dict[str, Any]:
        cell, clock, points, seen = self.cache.cell, self.cache.clock, [], self.seen
        top, hits, running, used, retained = end, 0, 0, end.used, 0.0
        # The engine's steps wait for this loop.
        while True:
            hits += top.hits
            if top.used > used:
                used = top.used
            if top.pins:
                running += top.pins
                if top.key in self.retained:
                    # A retention pins its cell.
                    running, retained = running - 1, max(retained, self.retained[top.key])
            point = top.resume
            if point is not None and self._points < MOST_POINTS:
                self._points += 1
                points.append({"tokens": top.depth * cell, "origin": point.origin.value, "hits": point.hits})
            above = top.parent
            if above is None or above.children != 1 or above.key not in seen:
                break
            top = above
        return {
            "name": _name(end),
            # The branch that this one continues. It may be missing from the outline, because it is older.
            "parent": None if above is None else _name(above),
            "from": (top.depth - 1) * cell,
            "to": end.depth * cell,
            "hits": hits,
            "running": running,
            "age": clock - used,
            # Seconds until the last retention of the branch ends.
            "retained": round(retained, 1) if retained > 0 else None,
            "points": points,
            "tenant": self._digest(top),
        }

    def _digest(self, node: Node) -> str | None:
        """Return the tenant's digest, or None if the way to the first cell is too long to look."""
        # Other branches come to this way where it forks.
        way = [node.key]
        above = node
        while above.key not in self._digests:
            if above.children != 1:
                way.append(above.key)
            if above.parent is None:
                digest = self.tenancy.of(above)
                self._digests[above.key] = None if digest == NO_TENANT else digest.hex()
                break
            above, self._climbs = above.parent, self._climbs + 1
            if self._climbs > self.most_cells:
                return None
        found = self._digests[above.key]
        self._digests.update(dict.fromkeys(way, found))
        return found


def _name(node: Node) -> str:
    return node.key.hex()[:NAME_LETTERS]
