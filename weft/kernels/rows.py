"""Rows of a plan as 64-bit integers, usable as indices. Host only: no tensor is touched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.base.plan import Ints, Plan

Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowPositions:
    """Positions of a plan's rows, in their sequences and in the pack."""

    decodes: int  # leading rows of one token
    start: Longs
    end: Longs
    length: Longs
    first: Longs  # packed index of each row's first token
    cell_start: Longs  # grid position at or before `start`
    slots: Ints  # checkpoint there; 0 if there is none

    @classmethod
    def of(cls, plan: Plan, cell: int) -> RowPositions:
        start, end = plan.start.astype(np.int64), plan.end.astype(np.int64)
        length = end - start
        cell_start = start - start % cell
        # Rows without a checkpoint may have any index in the plan, even an invalid one.
        slots = np.where(cell_start > 0, plan.read_slot, 0)
        return cls(plan.decode_rows, start, end, length, np.cumsum(length) - length, cell_start, slots)


def ranges(low: Longs, counts: Longs) -> tuple[Longs, Longs]:
    """Return for every i the numbers low[i], low[i] + 1, ... (counts[i] of them), and the i they belong to, joined.

    >>> numbers, owners = ranges(np.array([5, 9]), np.array([3, 1]))
    >>> numbers.tolist(), owners.tolist()
    ([5, 6, 7, 9], [0, 0, 0, 1])
    """
    owners = np.repeat(np.arange(len(low)), counts)
    before = np.cumsum(counts) - counts
    return np.arange(len(owners)) + (low - before)[owners], owners
