"""Rows of a plan as 64-bit integers, usable as indices. Host only: no tensor is touched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.base.plan import Ints, Longs, Plan


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
