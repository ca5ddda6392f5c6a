"""Rows of several tokens of the state space recurrence, in three kernels, one after the other.

    steps    by piece and head: time steps and the log decay since the cell's start, tail and new tokens alike
    cells    by row and head (or some of its columns): the cells of a row in order, the state in registers
    keep     by row: what its last tokens leave in the tail; last, for a long row overwrites what its first cell reads

Whatever a row starts from, a cell is computed by the same operations on the same numbers in the same order: the sum
over the time steps of a whole cell, then its products. So a state at the grid does not depend on chunking.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.ssd_steps import time_step


@triton.jit(do_not_specialize=["pieces"])
def steps_kernel(
    dt, A, dt_bias, tail_dt, steps, totals,
    start, first, tails, piece_row, piece_position,
    pieces, dt_stride, dt_unit, low_limit, high_limit,
    HEADS: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns behind a row's end have a time step of 0: nothing decays there and nothing is added."""
    piece = tl.program_id(0)
    row = tl.load(piece_row + piece)
    begin = tl.load(start + row)
    token = tl.load(first + row)
    end = begin + tl.load(first + row + 1) - token
    tail = tl.load(tails + row).to(tl.int64)
    position = tl.load(piece_position + piece) + tl.arange(0, CELL)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    real = (head < HEADS)[None, :]
    is_new = ((position >= begin) & (position < end))[:, None] & real
    raw_at = dt + (token + position - begin).to(tl.int64)[:, None] * dt_stride + head[None, :]
    raw = tl.load(raw_at, mask=is_new, other=0.0)
    bias = None if dt_bias is None else tl.load(dt_bias + head, mask=head < HEADS, other=0.0)[None, :]
    kept_at = tail_dt + tail * dt_unit + (position % RING)[:, None] * HEADS + head[None, :]
    kept = tl.load(kept_at, mask=(position < begin)[:, None] & real, other=0.0)
    step = tl.where(is_new, time_step(raw, bias, low_limit, high_limit), kept)
    total = tl.cumsum(step * tl.load(A + head, mask=head < HEADS, other=0.0)[None, :], 0)
    at = (head[None, :] * pieces + piece).to(tl.int64) * CELL + tl.arange(0, CELL)[:, None]
    tl.store(steps + at, step, mask=real)
    tl.store(totals + at, total, mask=real)


@triton.jit
def own_weights(queries, keys, total, step, CELL: tl.constexpr, PRECISION: tl.constexpr):
    """What each token of a cell (a column) adds to each output (a row)."""
    cell = tl.arange(0, CELL)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    left = tl.exp(total[:, None] - total[None, :]) * step[None, :]
    # Above the diagonal the exponential may overflow: chosen away, never multiplied away.
    return tl.where(cell[:, None] >= cell[None, :], scores * left, 0.0).to(keys.dtype)


@triton.jit
def pass_cell(values, inputs, queries, keys, weights, total, step, last, skip, PRECISION: tl.constexpr):
    """One cell, some columns: the outputs, and the state after it."""
    outputs = tl.dot(queries, values.to(queries.dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
    outputs = tl.dot(weights, inputs, outputs, input_precision=PRECISION)
    if skip is not None:
        outputs += skip * inputs.to(tl.float32)
    left = (tl.exp(last - total) * step)[:, None]
    added = (inputs.to(tl.float32) * left).to(inputs.dtype)
    values = tl.dot(tl.trans(keys), added, values * tl.exp(last), input_precision=PRECISION)
    return outputs, values


@triton.jit(do_not_specialize=["decodes", "pieces"])
def cells_kernel(
    x, B, C, D, y, steps, totals, state, tail_x, tail_B,
    start, first, slots, tails, piece_slot, first_piece,
    decodes, pieces, x_stride, B_stride, C_stride, slot_stride, x_unit, B_unit,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, STATE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK columns of a head and, where REST is not 0, that many more behind them."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    BLOCKS: tl.constexpr = (HEAD_DIM - REST + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // BLOCKS
    group = head // GROUP_HEADS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    real = column < HEAD_DIM
    own = tl.program_id(1)
    row = own + decodes
    begin = tl.load(start + row)
    token = tl.load(first + row)
    end = tl.load(first + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    tail = tl.load(tails + row).to(tl.int64)
    piece = tl.load(first_piece + own)
    last_piece = tl.load(first_piece + own + 1) - 1
    skip = None if D is None else tl.load(D + head)

    cell = tl.arange(0, CELL)
    n = tl.arange(0, STATE_BLOCK)
    real_n = n < STATE
    inside = (group * STATE + n[:, None]) * WIDTH + (head % GROUP_HEADS) * HEAD_DIM + column[None, :]
    present = real_n[:, None] & real[None, :]
    values = tl.load(state + slot * slot_stride + inside, mask=present & (begin >= CELL), other=0.0)
    if REST:
        column_1 = HEAD_DIM - REST + tl.arange(0, REST)
        inside_1 = (group * STATE + n[:, None]) * WIDTH + (head % GROUP_HEADS) * HEAD_DIM + column_1[None, :]
        present_1 = real_n[:, None] & (column_1 >= 0)[None, :]
        values_1 = tl.load(state + slot * slot_stride + inside_1, mask=present_1 & (begin >= CELL), other=0.0)

    # The first cell, of which the tail may hold the beginning. Columns before the row's tokens are never outputs.
    offset = begin % CELL
    packed = token - offset + cell
    is_new = (cell >= offset) & (packed < end)
    is_kept = cell < offset
    ring = (begin - offset + cell) % RING
    key_at = packed.to(tl.int64)[:, None] * B_stride + group * STATE + n[None, :]
    query_at = packed.to(tl.int64)[:, None] * C_stride + group * STATE + n[None, :]
    kept_at = tail * B_unit + ring[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
    x_at = packed.to(tl.int64)[:, None] * x_stride + head * HEAD_DIM
    kept_x_at = tail * x_unit + ring[:, None] * (GROUPS * WIDTH) + head * HEAD_DIM
    y_at = packed.to(tl.int64)[:, None] * (GROUPS * WIDTH) + head * HEAD_DIM
    step_at = (head * pieces + piece).to(tl.int64) * CELL + cell

    new_n = is_new[:, None] & real_n[None, :]
    kept_n = is_kept[:, None] & real_n[None, :]
    queries = tl.load(C + query_at, mask=new_n, other=0.0)
    keys = tl.where(
        kept_n, tl.load(tail_B + kept_at, mask=kept_n, other=0.0), tl.load(B + key_at, mask=new_n, other=0.0)
    )
    total = tl.load(totals + step_at)
    step = tl.load(steps + step_at)
    last = tl.sum(tl.where(cell == CELL - 1, total, 0.0), 0)
    weights = own_weights(queries, keys, total, step, CELL, PRECISION)
    new_x = is_new[:, None] & real[None, :]
    kept_x = is_kept[:, None] & real[None, :]
    inputs = tl.where(
        kept_x,
        tl.load(tail_x + kept_x_at + column[None, :], mask=kept_x, other=0.0),
        tl.load(x + x_at + column[None, :], mask=new_x, other=0.0),
    )
    outputs, values = pass_cell(values, inputs, queries, keys, weights, total, step, last, skip, PRECISION)
    tl.store(y + y_at + column[None, :], outputs.to(y.dtype.element_ty), mask=new_x)
    target = tl.load(piece_slot + piece).to(tl.int64)
    if target >= 0:
        tl.store(state + target * slot_stride + inside, values, mask=present)
    if REST:
        new_x = is_new[:, None] & (column_1 >= 0)[None, :]
        kept_x = is_kept[:, None] & (column_1 >= 0)[None, :]
        inputs = tl.where(
            kept_x,
            tl.load(tail_x + kept_x_at + column_1[None, :], mask=kept_x, other=0.0),
            tl.load(x + x_at + column_1[None, :], mask=new_x, other=0.0),
        )
        outputs, values_1 = pass_cell(values_1, inputs, queries, keys, weights, total, step, last, skip, PRECISION)
        tl.store(y + y_at + column_1[None, :], outputs.to(y.dtype.element_ty), mask=new_x)
        if target >= 0:
            tl.store(state + target * slot_stride + inside_1, values_1, mask=present_1)

    for number in tl.range(1, last_piece - piece + 1, num_stages=STAGES):
        is_new = packed < end - number * CELL
        new_n = is_new[:, None] & real_n[None, :]
        further = (packed + number * CELL).to(tl.int64)[:, None]
        queries = tl.load(C + further * C_stride + group * STATE + n[None, :], mask=new_n, other=0.0)
        keys = tl.load(B + further * B_stride + group * STATE + n[None, :], mask=new_n, other=0.0)
        total = tl.load(totals + step_at + number * CELL)
        step = tl.load(steps + step_at + number * CELL)
        target = tl.load(piece_slot + piece + number).to(tl.int64)
        last = tl.sum(tl.where(cell == CELL - 1, total, 0.0), 0)
        weights = own_weights(queries, keys, total, step, CELL, PRECISION)
        new_x = is_new[:, None] & real[None, :]
        inputs = tl.load(x + further * x_stride + head * HEAD_DIM + column[None, :], mask=new_x, other=0.0)
        outputs, values = pass_cell(values, inputs, queries, keys, weights, total, step, last, skip, PRECISION)
        y_here = y + further * (GROUPS * WIDTH) + head * HEAD_DIM
        tl.store(y_here + column[None, :], outputs.to(y.dtype.element_ty), mask=new_x)
        if REST:
            new_x = is_new[:, None] & (column_1 >= 0)[None, :]
            inputs = tl.load(x + further * x_stride + head * HEAD_DIM + column_1[None, :], mask=new_x, other=0.0)
            outputs, values_1 = pass_cell(values_1, inputs, queries, keys, weights, total, step, last, skip, PRECISION)
            tl.store(y_here + column_1[None, :], outputs.to(y.dtype.element_ty), mask=new_x)
        if target >= 0:
            tl.store(state + target * slot_stride + inside, values, mask=present)
            if REST:
                tl.store(state + target * slot_stride + inside_1, values_1, mask=present_1)


@triton.jit(do_not_specialize=["decodes", "pieces"])
def keep_kernel(
    x, B, steps, totals, tail_x, tail_B, tail_dt, tail_decay,
    start, first, tails, first_piece,
    decodes, pieces, x_stride, B_stride, x_unit, B_unit, dt_unit, decay_unit,
    HEADS: tl.constexpr, INNER: tl.constexpr, KEYS: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The k-th last token of a row, for all k below the tail's length."""
    own = tl.program_id(1)
    row = own + decodes
    token = tl.load(first + row)
    end = tl.load(first + row + 1)
    packed = end - 1 - tl.program_id(0)
    if packed >= token:
        tail = tl.load(tails + row).to(tl.int64)
        begin = tl.load(start + row)
        position = begin + packed - token
        here = position % RING
        at = tl.arange(0, BLOCK)
        for done in range(0, INNER, BLOCK):
            mask = done + at < INNER
            value = tl.load(x + packed.to(tl.int64) * x_stride + done + at, mask=mask)
            tl.store(tail_x + tail * x_unit + here * INNER + done + at, value, mask=mask)
        for done in range(0, KEYS, BLOCK):
            mask = done + at < KEYS
            value = tl.load(B + packed.to(tl.int64) * B_stride + done + at, mask=mask)
            tl.store(tail_B + tail * B_unit + here * KEYS + done + at, value, mask=mask)
        piece = tl.load(first_piece + own) + position // CELL - begin // CELL
        for done in range(0, HEADS, BLOCK):
            head = done + at
            step_at = (head * pieces + piece).to(tl.int64) * CELL + position % CELL
            step = tl.load(steps + step_at, mask=head < HEADS)
            tl.store(tail_dt + tail * dt_unit + here * HEADS + head, step, mask=head < HEADS)
            total = tl.load(totals + step_at, mask=head < HEADS)
            tl.store(tail_decay + tail * decay_unit + here * HEADS + head, total, mask=head < HEADS)
