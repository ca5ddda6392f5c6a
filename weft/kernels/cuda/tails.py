"""Positions of an open cell's tokens in a tail. The kernels read the tails themselves."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ring_places(opening, column, CELL: tl.constexpr, RING: tl.constexpr):
    """Return the ring indices of the cell's columns; `opening` is the position where the cell starts.

    If the ring is as long as a cell, its index 0 is the start of the cell: the indices are consecutive, and load
    together.
    """
    return column if RING == CELL else (opening + column) % RING
