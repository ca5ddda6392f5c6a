"""One budget of bytes, cut into equal slabs; a slab holds units of one kind and is returned when it is empty.

Counts the owners of every unit and frees it at zero; knows nothing about the purpose of units. Unit `i` of a kind lies
at byte `i * unit_bytes[kind]`; a slab offers the units that lie wholly inside it, so one stride reaches all units of a
kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from weft.base.errors import OptionError
from weft.memory.kinds import Kind

MAX_MULTIPLE = 16
TOLERATED_WASTE = 0.02


def units_in_slab(slab: int, slab_bytes: int, size: int) -> range:
    """Return the indices of the units of `size` bytes that lie wholly inside a slab.

    >>> units_in_slab(0, 10, 3), units_in_slab(1, 10, 3)
    (range(0, 3), range(4, 6))
    """
    return range(-(-slab * slab_bytes // size), (slab + 1) * slab_bytes // size)


def slabs_for(size: int, slab_bytes: int, units: int) -> int:
    """Return the number of slabs that surely hold `units` of `size` bytes, wherever the slabs lie."""
    surely = slab_bytes // size - (slab_bytes % size != 0)
    return -(-units // surely)


def choose_slab_bytes(unit_bytes: Mapping[Kind, int], budget_bytes: int) -> int:
    """Return a multiple of the largest unit that wastes little of the others and leaves enough slabs.

    Every slab has room for at least one unit of every kind.

    >>> choose_slab_bytes({Kind.PAGE: 64, Kind.STATE: 96}, 100_000) % 96
    0
    """
    largest = max(unit_bytes.values())
    # Tails are few, one for each running sequence: large slabs for their sake would tie up more than they save.
    lasting = [size for kind, size in unit_bytes.items() if kind is not Kind.TAIL or len(unit_bytes) == 1]

    def waste(multiple: int) -> float:
        slab = multiple * largest
        # Placement repeats after `size` slabs; sixteen are a good sample.
        used = (sum(len(units_in_slab(i, slab, size)) for i in range(16)) * size for size in lasting)
        return 1 - min(used) / (16 * slab)

    def fits_all(multiple: int) -> bool:
        slab = multiple * largest
        return all(slab % size == 0 or slab >= 2 * size for size in unit_bytes.values())

    few = max(2, budget_bytes // (32 * largest))
    multiples = [m for m in range(1, min(MAX_MULTIPLE, few) + 1) if fits_all(m)]
    # A slab can change its kind only when all of it is free, so a small slab is worth a little waste.
    return next((m for m in multiples if waste(m) <= TOLERATED_WASTE), max(multiples)) * largest


class Arena:
    def __init__(self, unit_bytes: Mapping[Kind, int], budget_bytes: int, remember_freed: bool = False) -> None:
        self.unit_bytes = dict(unit_bytes)
        self.slab_bytes = choose_slab_bytes(unit_bytes, budget_bytes)
        self.slabs = budget_bytes // self.slab_bytes
        if self.slabs < len(unit_bytes):
            need = self.slab_bytes * len(unit_bytes)
            raise OptionError(f"memory is {budget_bytes} bytes but this model needs at least {need}; raise --memory")
        self.owners: dict[Kind, dict[int, int]] = {kind: {} for kind in unit_bytes}
        self.freed: list[tuple[str, int]] = []
        self.remembers_freed = remember_freed
        # Where units go that lose their last owner, instead of becoming free: the list is then their owner.
        self.withheld: list[tuple[str, int]] | None = None
        self._withheld_later: dict[tuple[str, int], list[tuple[str, int]]] = {}
        # Empty slabs, lowest first. May name a slab that was claimed meanwhile.
        self._empty = list(range(self.slabs))
        self.used_slabs = 0
        self._kind_of: list[Kind | None] = [None] * self.slabs
        self._free_units: defaultdict[int, list[int]] = defaultdict(list)
        self._live = [0] * self.slabs
        # Slabs with room, lowest first, so that high ones drain. May name a slab that has filled or changed its kind.
        self._with_room: dict[Kind, list[int]] = {kind: [] for kind in unit_bytes}

    def take(self, kind: Kind) -> int | None:
        """Return a free unit with one owner, or None."""
        slab = self._slab_with_room(kind)
        if slab is None:
            return None
        unit = self._free_units[slab].pop()
        self._live[slab] += 1
        self.owners[kind][unit] = 1
        return unit

    def claim_all(self, kind: Kind, units: Sequence[int]) -> set[int]:
        """Take certain units of a kind, with one owner each, from empty slabs; return those that could be taken.

        For units that a file already holds. A unit cannot be taken if it crosses a slab or lies beyond the last one.
        """
        size = self.unit_bytes[kind]
        found = np.sort(np.asarray(units, np.int64))
        # As `np.unique`, which takes ten times as long.
        found = found[np.diff(found, prepend=-1) > 0]
        slab = found * size // self.slab_bytes
        # A slab offers the units that lie wholly inside it.
        first, end = -(-slab * self.slab_bytes // size), (slab + 1) * self.slab_bytes // size
        inside = (slab < self.slabs) & (found >= first) & (found < end)
        blocked = np.array([known is not None for known in self._kind_of])
        inside &= ~blocked[np.minimum(slab, self.slabs - 1)]
        starts = np.flatnonzero(np.diff(slab[inside], prepend=-1))
        slabs, counts = slab[inside][starts], np.diff(starts, append=np.count_nonzero(inside))
        room = (end - first)[inside][starts]
        taken: set[int] = set(found[inside].tolist())
        kinds, live = np.array(self._kind_of, object), np.array(self._live)
        kinds[slabs], live[slabs] = kind, counts
        self._kind_of, self._live = kinds.tolist(), live.tolist()
        self.used_slabs += len(slabs)
        for each in slabs[counts < room].tolist():
            free = reversed(units_in_slab(each, self.slab_bytes, size))
            self._free_units[each] = [unit for unit in free if unit not in taken]
            self._with_room[kind].append(each)
        heapify(self._with_room[kind])
        self.owners[kind].update(dict.fromkeys(taken, 1))
        return taken

    def share(self, kind: Kind, unit: int) -> None:
        self.owners[kind][unit] += 1

    def release(self, kind: Kind, unit: int) -> None:
        """Release one ownership; the last one frees the unit."""
        owners = self.owners[kind]
        owners[unit] -= 1
        if owners[unit]:
            return
        keeper = self.withheld
        if keeper is None and self._withheld_later:
            keeper = self._withheld_later.pop((kind.value, unit), None)
        if keeper is not None:
            owners[unit] = 1
            keeper.append((kind.value, unit))
            return
        del owners[unit]
        if self.remembers_freed:
            self.freed.append((kind.value, unit))
        slab = unit * self.unit_bytes[kind] // self.slab_bytes
        self._live[slab] -= 1
        if self._live[slab] == 0:
            self._kind_of[slab] = None
            self.used_slabs -= 1
            heappush(self._empty, slab)
            return
        if not self._free_units[slab]:
            heappush(self._with_room[kind], slab)
        self._free_units[slab].append(unit)

    def withhold_when_freed(self, units: set[tuple[str, int]], keeper: list[tuple[str, int]]) -> None:
        """Let `keeper` own these units, which are in use, when they lose their last owner."""
        self._withheld_later |= dict.fromkeys(units, keeper)

    def is_free(self, kind: Kind, unit: int) -> bool:
        """Return whether nothing owns a unit, or other units that lie in its place."""
        slab = unit * self.unit_bytes[kind] // self.slab_bytes
        return self._kind_of[slab] in (None, kind) and unit not in self.owners[kind]

    def used(self, kind: Kind) -> int:
        return len(self.owners.get(kind, ()))

    def slabs_for(self, kind: Kind, units: int) -> int:
        """Return the number of slabs that surely hold `units` of a kind."""
        return slabs_for(self.unit_bytes[kind], self.slab_bytes, units)

    def _slab_with_room(self, kind: Kind) -> int | None:
        candidates = self._with_room[kind]
        while candidates:
            slab = candidates[0]
            if self._kind_of[slab] is kind and self._free_units[slab]:
                return slab
            heappop(candidates)
        while self._empty:
            slab = heappop(self._empty)
            if self._kind_of[slab] is None:
                self._devote(slab, kind)
                return slab
        return None

    def _devote(self, slab: int, kind: Kind) -> None:
        """Let an empty slab hold units of a kind."""
        self._kind_of[slab] = kind
        self.used_slabs += 1
        self._free_units[slab] = list(reversed(units_in_slab(slab, self.slab_bytes, self.unit_bytes[kind])))
        heappush(self._with_room[kind], slab)
