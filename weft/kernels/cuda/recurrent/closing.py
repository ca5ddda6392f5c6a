"""States at the grid: the one that a row starts from, and the captured ones that it writes.

A head's state is a matrix; `inside` are the offsets of some of its elements, `real` which of them exist.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_state(state, state_stride, at, inside, real, CELL):
    """Load the state at the start of a row's first cell: zeros in a sequence's first cell."""
    return tl.load(state + at.slot * state_stride + inside, real & (at.start >= CELL), 0.0)


@triton.jit
def capture(state, state_stride, slot, inside, values, real):
    """Store a state in its slot, if the plan has one for it."""
    if slot >= 0:
        tl.store(state + slot.to(tl.int64) * state_stride + inside, values, real)


@triton.jit
def half(x, wanted, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return one half of 2 ROWS rows. Both halves of a matmul's rows lie in the same threads."""
    return tl.sum(tl.reshape(tl.where(wanted[:, None], x, 0.0), (2, ROWS, COLUMNS)), 0)


@triton.jit
def capture_halves(state, state_stride, slot, values, column, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Capture columns of a state of LINES lines that lie WIDTH apart.

    It goes by halves: lines are reordered in shared memory, which must fit two programs.
    """
    if slot >= 0:
        state += slot.to(tl.int64) * state_stride
        HALF: tl.constexpr = values.shape[0] // 2
        for part in tl.static_range(2):
            line = part * HALF + tl.arange(0, HALF)
            lines = half(values, (tl.arange(0, 2 * HALF) >= HALF) == (part == 1), HALF, values.shape[1])
            real = (line < LINES)[:, None] & (column < WIDTH)[None, :]
            tl.store(state + line[:, None] * WIDTH + column[None, :], lines, real)
