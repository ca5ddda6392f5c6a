"""Enters what a file holds into the cache of its tier: the path of a lookup at once, the rest step by step.

At the start, all units are claimed and indexed by key, with NumPy, so that a server with 500 GiB on disk answers from
them within a second. Headers are decoded, and their checksums compared, when their units are entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from weft.base.grid import first_window_cell
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import KINDS, UnitHeader
from weft.memory.trie import Node

# To find the cell above another takes a fraction of the time that entering it takes.
CLIMBED_PER_CELL = 8
# Rows of a file that a drop looks at in one step.
ROWS_PER_LOOK = 1 << 14


class Restoring:
    def __init__(self, cache: Cache, file: DiskFile, tenancy: Tenancy) -> None:
        self.cache = cache
        self.file = file
        self.tenancy = tenancy
        # Units that an earlier process was about to erase: claimed, and not indexed.
        self.doomed: list[tuple[Kind, int]] = []
        self._pages: dict[Key, int] = {}
        self._states: dict[Key, int] = {}
        self._windows: dict[Key, list[int]] = {}
        for kind in (Kind.PAGE, Kind.STATE, Kind.WINDOW):
            if kind in cache.arena.unit_bytes:
                self._index(kind)
        pointed = Kind.STATE in cache.arena.unit_bytes or Kind.WINDOW in cache.arena.unit_bytes
        self._points = list({**dict.fromkeys(self._states), **dict.fromkeys(self._windows)}) if pointed else []
        # Ends of paths come last, so that each is entered with all of what is above it.
        self._rest = list(self._pages)
        self._entering = self._enter_rest()

    def _index(self, kind: Kind) -> None:
        rows = self.file.rows
        of_kind = np.flatnonzero(rows["kind"] == KINDS.index(kind))
        units = rows["unit"][of_kind].tolist()
        doomed = [unit for each, unit in self.file.doomed if each is kind]
        taken = self.cache.arena.claim_all(kind, [*units, *doomed])
        self.doomed += [(kind, unit) for unit in doomed if unit in taken]
        taken.difference_update(doomed)
        keys = rows["key"][of_kind].tolist()
        index = self._pages if kind is Kind.PAGE else self._states
        if kind is not Kind.WINDOW and len(taken) == len(units):
            index.update(zip(keys, of_kind.tolist(), strict=True))
            if len(index) == len(units):
                return
            index.clear()
        for row, unit, key in zip(of_kind.tolist(), units, keys, strict=True):
            if unit not in taken:
                continue
            if kind is Kind.WINDOW:
                self._windows.setdefault(key, []).append(row)
            elif index.setdefault(key, row) != row:
                self._release(kind, unit)

    def _release(self, kind: Kind, unit: int) -> None:
        self.cache.arena.release(kind, unit)

    def _unit(self, row: int) -> tuple[Kind, int]:
        entry = self.file.rows[row]
        return KINDS[int(entry["kind"])], int(entry["unit"])

    def _drop(self, row: int) -> None:
        self._release(*self._unit(row))

    # paths ----------------------------------------------------------------------------------------------------------

    def enter_path(self, keys: list[Key]) -> None:
        """Enter the cells of a prompt, as far as the file has them, with their resume points."""
        for _ in self._enter(keys, None):
            pass

    def _enter(self, keys: list[Key], above: Key | None) -> Iterator[None]:
        """Enter cells that follow each other below `above`; yields after each."""
        entered: list[Node] = []
        nodes = self.cache.trie.nodes
        for key in keys:
            node, parent = nodes.get(key), None if above is None else nodes.get(above)
            if node is None and (above is None or parent is not None):
                node = self._enter_cell(key, parent)
                entered += [] if node is None else [node]
            if node is None:
                break
            self._enter_point(node)
            above = key
            yield
        # Not before, so that the end of a path is not evicted while the rest is still to come.
        for count, node in enumerate(entered, 1):
            # A drop may have removed it since.
            if nodes.get(node.key) is node:
                self.cache.valuation.offer(node)
            if count % CLIMBED_PER_CELL == 0:
                yield

    def _enter_cell(self, key: Key, parent: Node | None) -> Node | None:
        """Enter a cell below `parent`, if the file has it there."""
        row = self._pages.pop(key, None)
        if row is None:
            return None
        header = self.file.header(row)
        depth = 1 if parent is None else parent.depth + 1
        above = None if parent is None else parent.key
        if header is None or header.key != key or header.parent != above or header.position != depth * self.cache.cell:
            self._drop(row)
            return None
        if parent is None:
            self.tenancy.note(key, _tenant_of(header))
        return self.cache.publish(key, parent, header.unit)

    def _enter_point(self, node: Node) -> None:
        cache, spec, key = self.cache, self.cache.spec, node.key
        if key not in self._states and key not in self._windows:
            return
        rows = [*([self._states.pop(key)] if key in self._states else []), *self._windows.pop(key, [])]
        headers = [header for row in rows if (header := self.file.header(row)) is not None]
        position = node.depth * cache.cell
        states = [each for each in headers if each.kind is Kind.STATE and each.position == position]
        window = sorted((each for each in headers if each.kind is Kind.WINDOW), key=lambda each: each.position)
        first = first_window_cell(position, spec.window, spec.cell) if spec.window else node.depth
        ends = [cache.cell * (depth + 1) for depth in range(first, node.depth)]
        needs_state = Kind.STATE in cache.arena.unit_bytes
        if node.resume is None and len(states) == needs_state and [each.position for each in window] == ends:
            slot = states[0].unit if states else None
            if slot is not None:
                cache.written_for[slot] = position
            cache.keep(key, slot, tuple(each.unit for each in window))
            cache.explain(key, headers[0].origin)
        # The point has its own share of what it keeps; the rest is free again.
        for row in rows:
            kind, unit = self._unit(row)
            if kind is Kind.STATE:
                cache.release_slot(unit)
            else:
                self._release(kind, unit)

    # the rest -------------------------------------------------------------------------------------------------------

    def enter_some(self, most: int) -> bool:
        """Enter up to about this many cells, however long their paths are; return whether there may be more."""
        return all(next(self._entering, False) is None for _ in range(most))

    def _enter_rest(self) -> Iterator[None]:
        for keys in (self._points, self._rest):
            while keys:
                yield from self._enter_key(keys.pop())
                yield

    def _enter_key(self, key: Key) -> Iterator[None]:
        """Enter a cell with all that is missing above it, or drop what is left of it; yields now and then.

        Between two parts, lookups may enter some of the cells, and drops may release them.
        """
        missing: list[Key] = []
        nodes, rows = self.cache.trie.nodes, self.file.rows
        here: Key | None = key
        while here is not None and here not in nodes and here in self._pages and len(missing) <= len(rows):
            missing.append(here)
            parent = rows[self._pages[here]]["parent"].tobytes()
            here = parent if any(parent) else None
            if len(missing) % CLIMBED_PER_CELL == 0:
                yield
        if not missing and key in nodes:
            # The cell itself is there already; its point may not be.
            self._enter_point(nodes[key])
        elif here is None or here in nodes:
            yield from self._enter(missing[::-1], here)
        # If a cell above is missing or damaged, nothing leads here any more.
        for row in (self._pages.pop(key, None), self._states.pop(key, None), *self._windows.pop(key, [])):
            if row is not None:
                self._drop(row)

    def rows_of(self, tenant: bytes | None, first: int, end: int) -> list[int]:
        """Return the rows of the file in [first, end) with units of a tenant, or of all."""
        rows = self.file.rows[first:end]
        if tenant is None:
            return list(range(first, first + len(rows)))
        wanted = np.frombuffer(tenant.ljust(16, b"\0"), "<u8")
        found = np.ascontiguousarray(rows["tenant"]).view("<u8").reshape(-1, 2) == wanted
        return (first + np.flatnonzero(found.all(axis=1))).tolist()

    def rows_to_drop(self, tenant: bytes | None) -> RowsToDrop:
        return RowsToDrop(self, tenant)

    def drop(self, rows: Iterable[int]) -> int:
        """Release the units of these rows that are not entered yet; return how many of them are pages."""
        pages = 0
        for row in rows:
            entry = self.file.rows[row]
            kind, key = KINDS[int(entry["kind"])], entry["key"].tobytes()
            if kind is Kind.WINDOW:
                for each in self._windows.pop(key, []):
                    self._drop(each)
                continue
            index = self._pages if kind is Kind.PAGE else self._states
            if index.get(key) == row:
                del index[key]
                self._drop(row)
                pages += kind is Kind.PAGE
        return pages

    def held(self) -> Iterator[tuple[Kind, int]]:
        """Yield the units that are claimed and not entered yet."""
        for index in (self._pages, self._states):
            for row in index.values():
                yield self._unit(row)
        for rows in self._windows.values():
            for row in rows:
                yield self._unit(row)


class RowsToDrop:
    """The rows of a file with units of a tenant, or of all, that are still to be dropped; found part by part."""

    def __init__(self, restoring: Restoring, tenant: bytes | None) -> None:
        self._restoring = restoring
        self._tenant = tenant
        self._looked = 0
        self._found: list[int] = []

    @property
    def ended(self) -> bool:
        return not self._found and self._looked >= len(self._restoring.file.rows)

    def drop_some(self, most: int) -> int:
        """Drop the units of up to this many rows that are not entered yet; return how many of them are pages."""
        if not self._found:
            first, self._looked = self._looked, self._looked + ROWS_PER_LOOK
            self._found = self._restoring.rows_of(self._tenant, first, self._looked)[::-1]
        taken, self._found[-most:] = self._found[-most:], []
        return self._restoring.drop(reversed(taken))


def _tenant_of(header: UnitHeader) -> Callable[[], bytes]:
    return lambda: header.tenant
