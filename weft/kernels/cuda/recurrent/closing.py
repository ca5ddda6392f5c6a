"""States at the grid: the one that a row starts from, and the captured ones that it writes.

A head's state is a matrix; `inside` are the offsets of some of its elements, `real` which of them exist. In slots its
numbers may have fewer bits than here (`weft/kernels/states.py` defines them); their type says so. Where they are codes,
`scales` points to the scales of the same lines and columns. A program always holds whole blocks of lines.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from weft.kernels import states

BLOCK = tl.constexpr(states.LINES)
LARGEST, LEAST = tl.constexpr(float(states.LARGEST)), tl.constexpr(states.LEAST)
INFINITY = tl.constexpr(float("inf"))
# A float32 of this size has no fraction: what is added to it is rounded to the nearest, to even ones between two.
WHOLE = tl.constexpr(1.5 * 2**23)


class StateScales(NamedTuple):
    """Scales of some lines, [blocks, columns]."""

    place: tl.tensor  # in slot 0
    real: tl.tensor


@triton.jit
def scales_of(
    state_scales, matrix, low, column, real, HELD: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return the scales of HELD lines, from `low` on, of some columns of a matrix [LINES, WIDTH], if it has any."""
    if state_scales is None:
        found = None
    else:
        BLOCKS: tl.constexpr = (LINES + BLOCK - 1) // BLOCK
        block = low // BLOCK + tl.arange(0, (HELD + BLOCK - 1) // BLOCK)
        place = state_scales + ((matrix * BLOCKS + block)[:, None] * WIDTH + column[None, :])
        found = StateScales(place, (block < BLOCKS)[:, None] & real[None, :])
    return found


@triton.jit
def scaled(codes, scale):
    """Return the numbers that codes stand for."""
    SIZE: tl.constexpr = codes.shape[0] // scale.shape[0]
    blocks = tl.reshape(codes, (scale.shape[0], SIZE, codes.shape[1])) * scale.to(tl.float32)[:, None, :]
    return tl.reshape(blocks, codes.shape)


@triton.jit
def encoded(values, BLOCKS: tl.constexpr):
    """Return the codes of some lines, which are whole numbers, and their scales."""
    SIZE: tl.constexpr = values.shape[0] // BLOCKS
    blocks = tl.reshape(values, (BLOCKS, SIZE, values.shape[1]))
    # Of what is no number the bits are the largest.
    largest = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LARGEST).to(tl.bfloat16)
    used = scale.to(tl.float32)
    is_used = (used >= LEAST) & (used < INFINITY)
    inverse = tl.div_rn(1.0, tl.where(is_used, used, 1.0))
    # No code exceeds the bounds once it is rounded; but between product and sum, they keep both from being rounded as
    # one.
    codes = tl.minimum(tl.maximum(blocks * inverse[:, None, :], -LARGEST), LARGEST)
    codes = tl.where(is_used[:, None, :], (codes + WHOLE) - WHOLE, 0.0)
    return tl.reshape(codes, values.shape), scale


@triton.jit
def load_state(state, state_stride, at, inside, real, CELL, scales=None, ACROSS: tl.constexpr = False):
    """Load the state at the start of a row's first cell: zeros in a sequence's first cell. ACROSS: columns first."""
    values = tl.load(state + at.slot * state_stride + inside, real & (at.start >= CELL), 0.0).to(tl.float32)
    if scales is not None:
        # They lie in the same slots, and have twice the bytes.
        scale = tl.load(scales.place + at.slot * (state_stride // 2), scales.real & (at.start >= CELL), 0.0)
        values = tl.trans(scaled(tl.trans(values), scale)) if ACROSS else scaled(values, scale)
    return values


@triton.jit
def capture(state, state_stride, slot, inside, values, real, scales=None, ACROSS: tl.constexpr = False):
    """Store a state in its slot, if the plan has one for it. Return it as it will be read, there or not."""
    if scales is None:
        stored = values.to(state.dtype.element_ty)
        values = stored.to(tl.float32)
    else:
        codes, scale = encoded(tl.trans(values) if ACROSS else values, scales.place.shape[0])
        values = scaled(codes, scale)
        if ACROSS:
            codes, values = tl.trans(codes), tl.trans(values)
        stored = codes.to(state.dtype.element_ty)
    if slot >= 0:
        tl.store(state + slot.to(tl.int64) * state_stride + inside, stored, real)
        if scales is not None:
            tl.store(scales.place + slot.to(tl.int64) * (state_stride // 2), scale, scales.real)
    return values


@triton.jit
def half(x, wanted, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return one half of 2 ROWS rows. Both halves of a matmul's rows lie in the same threads."""
    return tl.sum(tl.reshape(tl.where(wanted[:, None], x, 0.0), (2, ROWS, COLUMNS)), 0)


@triton.jit
def capture_halves(
    state, state_stride, slot, values, column, LINES: tl.constexpr, WIDTH: tl.constexpr, scales=None
):  # fmt: skip
    """Do as `capture` with columns of a state of LINES lines that lie WIDTH apart.

    Float32 goes by halves: lines are reordered in shared memory, which must fit two programs.
    """
    if state.dtype.element_ty != tl.float32:
        line = tl.arange(0, values.shape[0])
        real = (line < LINES)[:, None] & (column < WIDTH)[None, :]
        values = capture(
            state, state_stride, slot, line[:, None] * WIDTH + column[None, :], values, real, scales
        )  # fmt: skip
    elif slot >= 0:
        state += slot.to(tl.int64) * state_stride
        HALF: tl.constexpr = values.shape[0] // 2
        for part in tl.static_range(2):
            line = part * HALF + tl.arange(0, HALF)
            lines = half(values, (tl.arange(0, 2 * HALF) >= HALF) == (part == 1), HALF, values.shape[1])
            real = (line < LINES)[:, None] & (column < WIDTH)[None, :]
            tl.store(state + line[:, None] * WIDTH + column[None, :], lines, real)
    return values
