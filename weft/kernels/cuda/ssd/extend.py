"""The state space recurrence for rows of several tokens, in three consecutive kernels.

    steps    by piece and head: time steps and the log decay since the cell's start, of tail and new tokens alike
    cells    by row and head (or some of its columns): the cells of a row in order, the state in registers
    keep     by row: store its last tokens in the tail; last, since a long row overwrites what its first cell reads

Wherever a row starts, a cell is computed by the same operations on the same numbers in the same order: the sum over the
time steps of a whole cell, then its matmuls. So a state at the grid does not depend on chunking.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.recurrent.closing import capture, load_state, scales_of
from weft.kernels.cuda.recurrent.tails import columns_of, is_short, keep_token, kept_from, open_cell, place_of
from weft.kernels.cuda.ssd.steps import LOG2_E, load_unpadded, time_step, unpadded


@jit(**STEP)
def steps_kernel(
    dt, dt_stride, A, dt_bias, low_limit, high_limit, totals, shifted, left,
    state, state_stride, state_scales, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay,
    tail_decay_stride, tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    HEADS: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute each token's decays.

    These are the decay since the cell's start, the same less the logarithm of the time step (so that one exponential
    gives both), and the time step decayed to the cell's end. Columns after a row's end have a time step of 0: nothing
    decays there and nothing is added.
    """
    piece = tl.program_id(0)
    at = place_of(tl.load(piece_row + piece), row_start, row_first, row_slot, row_tail, row_closing, CELL)
    cell = tl.arange(0, CELL)
    tokens = columns_of(at, tl.load(piece_position + piece), cell, CELL, RING)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    real = (head < HEADS)[None, :]
    is_new = tokens.is_new[:, None] & real
    raw_at = dt + tokens.token[:, None] * dt_stride + head[None, :]
    raw = tl.load(raw_at, mask=is_new, other=0.0)
    bias = None if dt_bias is None else tl.load(dt_bias + head, mask=head < HEADS, other=0.0)[None, :]
    kept_at = tail_dt + at.tail * tail_dt_stride + head[None, :] * RING + tokens.ring[:, None]
    kept = tl.load(kept_at, mask=tokens.is_tail[:, None] & real, other=0.0)
    step = tl.where(is_new, time_step(raw, bias, low_limit, high_limit), kept)
    rate = tl.load(A + head, mask=head < HEADS, other=0.0) * LOG2_E
    total = tl.cumsum(step * rate[None, :], 0)
    last = tl.sum(tl.where(cell[:, None] == CELL - 1, total, 0.0), 0)
    step_at = (head[None, :] * pieces + piece).to(tl.int64) * CELL + cell[:, None]
    tl.store(totals + step_at, total, mask=real)
    tl.store(shifted + step_at, total - tl.log2(step), mask=real)
    tl.store(left + step_at, tl.exp2(last[None, :] - total) * step, mask=real)


@triton.jit
def own_weights(queries, keys, total, shifted, CELL: tl.constexpr, PRECISION: tl.constexpr):
    """Return what each token of a cell (a column) adds to each output (a row)."""
    cell = tl.arange(0, CELL)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores *= tl.exp2(total[:, None] - shifted[None, :])
    # Above the diagonal the exponential may overflow: select, never multiply by zero.
    return tl.where(cell[:, None] >= cell[None, :], scores, 0.0).to(keys.dtype)


@triton.jit
def pass_cell(values, inputs, queries, keys, weights, total, left, last, skip, PRECISION: tl.constexpr):
    """Compute one cell, some columns: the outputs, and the state after it."""
    outputs = tl.dot(queries, values.to(queries.dtype), input_precision=PRECISION) * tl.exp2(total)[:, None]
    outputs = tl.dot(weights, inputs, outputs, input_precision=PRECISION)
    if skip is not None:
        outputs += skip * inputs.to(tl.float32)
    added = (inputs.to(tl.float32) * left[:, None]).to(inputs.dtype)
    values = tl.dot(tl.trans(keys), added, values * tl.exp2(last)[:, None], input_precision=PRECISION)
    return outputs, values


@triton.jit
def load_columns(at, real, WHOLE: tl.constexpr):
    """Load some columns, with 0 for those beyond a head's last; no mask if there are none."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=real[None, :], other=0.0)


@triton.jit
def load_opened(kept_at, new_at, kept, real):
    """Load columns of a row's first cell, whose first tokens are in the tail."""
    earlier = tl.load(kept_at, mask=kept[:, None] & real[None, :], other=0.0)
    return tl.where(kept[:, None], earlier, tl.load(new_at, mask=(kept == 0)[:, None] & real[None, :], other=0.0))


@jit(**STEP)
def cells_kernel(
    x, x_stride, B, B_stride, C, C_stride, D, y, y_stride, totals, shifted, left,
    state, state_stride, state_scales, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay,
    tail_decay_stride, tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take BLOCK columns of a head through all cells of a row. Rows of up to NEW tokens are left to `ssd_short`.

    Where a row ends inside a cell, its last token stands in for the missing ones: their time step is 0.
    """
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK - 1) // BLOCK
    WHOLE: tl.constexpr = BLOCKS * BLOCK == HEAD_DIM
    head = tl.program_id(0) // BLOCKS
    group = head // GROUP_HEADS
    own = tl.program_id(1)
    at = place_of(own + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, ROOM, NEW):
        return
    piece = tl.load(first_piece + own)
    count = tl.load(first_piece + own + 1) - piece
    skip = None if D is None else tl.load(D + head)

    # Pointers to this head's data, from the row's first cell on.
    cell = tl.arange(0, CELL)
    n = tl.arange(0, BLOCK_STATE)
    same = tl.zeros((BLOCK_STATE,), tl.int32)
    packed = (at.first - at.offset).to(tl.int64)
    tokens = at.end - at.start + at.offset
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    real = column < HEAD_DIM
    stored = unpadded(real[None, :], n[:, None], STATE, BLOCK_STATE)
    inside = (group * STATE + n[:, None]) * WIDTH + (head % GROUP_HEADS) * HEAD_DIM + column[None, :]
    step_at = (head * pieces + piece).to(tl.int64) * CELL
    x += head * HEAD_DIM
    y += head * HEAD_DIM
    C += group * STATE
    B += group * STATE
    piece_slot += piece

    of_group = (head % GROUP_HEADS) * HEAD_DIM + column
    scales_at = scales_of(state_scales, group, 0, of_group, real, BLOCK_STATE, STATE, WIDTH)
    values = load_state(state, state_stride, at, inside, stored, CELL, scales_at)

    # The first cell, whose beginning may be in the tail.
    kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
    line = tl.minimum(tl.maximum(cell, at.offset), tokens - 1)[:, None]
    is_new = cell[:, None] == line
    queries = load_unpadded(C + packed * C_stride + (line * C_stride + n[None, :]), n[None, :], STATE, BLOCK_STATE)
    kept_at = tail_B + at.tail * tail_B_stride + (group * RING + ring[:, None]) * STATE + n[None, :]
    keys = load_opened(kept_at, B + packed * B_stride + (line * B_stride + n[None, :]), kept, n < STATE)
    total = tl.load(totals + step_at + cell)
    remains = tl.load(left + step_at + cell)
    last = tl.load(totals + step_at + CELL - 1 + same)
    weights = own_weights(queries, keys, total, tl.load(shifted + step_at + cell), CELL, PRECISION)
    kept_at = tail_input + at.tail * tail_input_stride + (head * RING + ring[:, None]) * HEAD_DIM
    x_at = x + packed * x_stride + line * x_stride
    inputs = load_opened(kept_at + column[None, :], x_at + column[None, :], kept, real)
    outputs, values = pass_cell(values, inputs, queries, keys, weights, total, remains, last, skip, PRECISION)
    y_at = y + packed * y_stride + line * y_stride
    tl.store(y_at + column[None, :], outputs.to(y.dtype.element_ty), mask=is_new & real[None, :])
    values = capture(state, state_stride, tl.load(piece_slot), inside, values, stored, scales_at)

    # Triton does not prefetch loads that only scale sums, so they are issued one cell ahead.
    next_last = tl.load(totals + step_at + 2 * CELL - 1 + same, mask=count > 1, other=0.0)
    for number in range(1, count):
        last = next_last
        next_at = totals + step_at + (number + 2) * CELL - 1
        next_last = tl.load(next_at + same, mask=number + 1 < count, other=0.0)
        here = packed + number * CELL
        line = tl.minimum(cell, (packed + tokens - 1 - here).to(tl.int32))[:, None]
        is_new = cell[:, None] == line
        queries = load_unpadded(C + here * C_stride + (line * C_stride + n[None, :]), n[None, :], STATE, BLOCK_STATE)
        keys = load_unpadded(B + here * B_stride + (line * B_stride + n[None, :]), n[None, :], STATE, BLOCK_STATE)
        total = tl.load(totals + step_at + number * CELL + cell)
        since = tl.load(shifted + step_at + number * CELL + cell)
        remains = tl.load(left + step_at + number * CELL + cell)
        slot = tl.load(piece_slot + number)
        weights = own_weights(queries, keys, total, since, CELL, PRECISION)
        y_at = y + here * y_stride + line * y_stride
        inputs = load_columns(x + here * x_stride + (line * x_stride + column[None, :]), real, WHOLE)
        outputs, values = pass_cell(values, inputs, queries, keys, weights, total, remains, last, skip, PRECISION)
        tl.store(y_at + column[None, :], outputs.to(y.dtype.element_ty), mask=is_new & real[None, :])
        values = capture(state, state_stride, slot, inside, values, stored, scales_at)


@jit(**STEP)
def keep_kernel(
    x, x_stride, dt, dt_stride, B, B_stride, dt_bias, low_limit, high_limit, totals,
    state, state_stride, state_scales, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay,
    tail_decay_stride, tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the k-th last token of a row, if the tail keeps it. Short rows store their own."""
    own = tl.program_id(1)
    at = place_of(own + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    position = at.end - 1 - tl.program_id(0)
    if (position >= kept_from(at, CELL, RING)) & (is_short(at, ROOM, NEW) == 0):
        token = (at.first + position - at.start).to(tl.int64)
        here = position % RING
        keep_token(x + token * x_stride, tail_input + at.tail * tail_input_stride, here, HEADS, HEAD_DIM, RING, BLOCK)
        keep_token(B + token * B_stride, tail_B + at.tail * tail_B_stride, here, GROUPS, STATE, RING, BLOCK)
        piece = tl.load(first_piece + own) + position // CELL - at.start // CELL
        for done in range(0, HEADS, BLOCK):
            head = done + tl.arange(0, BLOCK)
            real = head < HEADS
            raw = tl.load(dt + token * dt_stride + head, mask=real, other=0.0)
            bias = None if dt_bias is None else tl.load(dt_bias + head, mask=real, other=0.0)
            step = time_step(raw, bias, low_limit, high_limit)
            tl.store(tail_dt + at.tail * tail_dt_stride + head * RING + here, step, mask=real)
            total_at = (head * pieces + piece).to(tl.int64) * CELL + position % CELL
            total = tl.load(totals + total_at, mask=real)
            tl.store(tail_decay + at.tail * tail_decay_stride + head * RING + here, total, mask=real)
