"""What a sequence needs if it has all memory to itself: its maximum length, and the least memory for a short one.

Slabs hold one kind of unit each, so needs are counted in whole slabs; counting bytes alone would promise too much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from weft.base.errors import OptionError
from weft.base.grid import cells_covering
from weft.base.options import PAGE_BYTES
from weft.memory.arena import choose_slab_bytes, slabs_for
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec

# A model whose memory does not grow with the text has room for any length; the count must end somewhere.
MOST_CELLS = 1 << 18


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that sequences need: cells with pages, pages of windows, and how many sequences they are."""

    pages: int
    window: int
    sequences: int

    def __add__(self, other: Room) -> Room:
        return Room(self.pages + other.pages, self.window + other.window, self.sequences + other.sequences)


NO_ROOM = Room(0, 0, 0)


def slabs_alone(spec: MemorySpec, sizes: Mapping[Kind, int], slab_bytes: int, tokens: int) -> int:
    """Return the number of slabs that a sequence of this length needs while it runs alone. `sizes` are its units'."""
    cells = cells_covering(tokens, spec.cell)
    units = {
        Kind.PAGE: cells,
        Kind.WINDOW: min(cells, spec.window_cells + 2),
        Kind.STATE: 2,
        Kind.TAIL: 1,
    }
    need = sum(slabs_for(size, slab_bytes, units[kind]) for kind, size in sizes.items())
    # Units that are allocated and freed while it runs may need one more slab.
    return need + sum(kind in sizes for kind in (Kind.WINDOW, Kind.STATE))


def longest_alone(spec: MemorySpec, budget_bytes: int) -> int:
    """Return the length of the longest sequence that this memory holds; 0 if it holds none."""
    sizes = unit_bytes(spec)
    slab_bytes = choose_slab_bytes(sizes, budget_bytes)
    slabs = budget_bytes // slab_bytes
    lengths = range(spec.cell, MOST_CELLS * spec.cell, spec.cell)
    return spec.cell * bisect_left(lengths, True, key=lambda n: slabs_alone(spec, sizes, slab_bytes, n) > slabs)


def least_bytes(spec: MemorySpec) -> int:
    """Return the least memory in which a sequence of one cell can run, in whole pages of the system."""
    # Such a small memory is always cut into slabs of the same size.
    sizes = unit_bytes(spec)
    slab_bytes = choose_slab_bytes(sizes, 0)
    need = slabs_alone(spec, sizes, slab_bytes, spec.cell) * slab_bytes
    return -(-need // PAGE_BYTES) * PAGE_BYTES


def draft_share(spec: MemorySpec, draft: MemorySpec, budget_bytes: int) -> int:
    """Return what a draft model takes of the memory of both, so that both hold about as many tokens.

    Neither has less than it needs for a short sequence, if there is memory for that.
    """
    whole, part = _bytes_of(spec), _bytes_of(draft)
    share = min(max(budget_bytes * part // (whole + part), least_bytes(draft)), budget_bytes - least_bytes(spec))
    return max(0, -(-share // PAGE_BYTES) * PAGE_BYTES)


def _bytes_of(spec: MemorySpec, cells: int = 64) -> int:
    units = {Kind.PAGE: cells, Kind.WINDOW: min(cells, spec.window_cells + 2), Kind.STATE: 2, Kind.TAIL: 1}
    return sum(size * units[kind] for kind, size in unit_bytes(spec).items())


def check_memory(spec: MemorySpec, budget_bytes: int) -> None:
    """Raise if not even a short sequence could run in this memory."""
    if longest_alone(spec, budget_bytes) == 0:
        raise OptionError(
            f"memory is {budget_bytes} bytes but this model needs at least {least_bytes(spec)}; raise --memory"
        )
