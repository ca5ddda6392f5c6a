"""Where the tokens of an open cell lie in a tail. Not the tails themselves: each kernel walks over its own parts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ring_places(opening, column, CELL: tl.constexpr, RING: tl.constexpr):
    """Of the cell's columns; `opening` is the position where the cell starts.

    A ring as long as a cell starts with it: then places are known to follow one another, and are loaded together.
    """
    return column if RING == CELL else (opening + column) % RING
