"""Decodes of the state space recurrence: one token per row, the state read once and written only when a cell closes.

    weigh    by row and some heads of a group: the weight of each token of the open cell in the output
    read     by row and some columns of a group (a column is one number of a head's x): the state, the tail, the output
             and its gate; and, as programs that come first and mostly end at once, the states of cells that close

A program that reads columns loads per-head values for all heads that these touch, and each column selects its own:
heads may have any width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.launch.overlap import wait
from weft.kernels.cuda.recurrent.closing import capture, load_state, scales_of
from weft.kernels.cuda.recurrent.tails import decay_before, open_cell, place_of
from weft.kernels.cuda.ssd.steps import LOG2_E, load_unpadded, time_step, unpadded


@jit(**STEP)
def weigh_kernel(
    dt, dt_stride, A, B, B_stride, C, C_stride, D, dt_bias, low_limit, high_limit, weights, scales,
    state, state_stride, state_scales, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay,
    tail_decay_stride, tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, HEAD_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weigh the open cell's tokens, and append the new one to the tail. Scales are of the state and, with D, of x."""
    HEADS: tl.constexpr = GROUPS * GROUP_HEADS
    CHUNKS: tl.constexpr = (GROUP_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    here = at.start % RING

    # Load what is older than the step.
    cell = tl.arange(0, CELL)
    kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
    n = tl.arange(0, BLOCK_STATE)
    tail_B += at.tail * tail_B_stride + group * (RING * STATE)
    tail_dt += at.tail * tail_dt_stride
    tail_decay += at.tail * tail_decay_stride
    known_keys = unpadded(kept[:, None], n[None, :], STATE, BLOCK_STATE)
    keys = tl.load(tail_B + ring[:, None] * STATE + n[None, :], mask=known_keys, other=0.0)
    own = chunk * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    real = own < GROUP_HEADS
    head = group * GROUP_HEADS + own
    kept_at = head[:, None] * RING + ring[None, :]
    known = real[:, None] & kept[None, :]
    decay = tl.load(tail_decay + kept_at, mask=known, other=float("inf"))
    kept_dt = tl.load(tail_dt + kept_at, mask=known, other=0.0)
    total = decay_before(tail_decay + head * RING, at, real, RING)
    rate = tl.load(A + head, mask=real, other=0.0) * LOG2_E
    bias = None if dt_bias is None else tl.load(dt_bias + head, mask=real, other=0.0)

    wait(EARLY)
    query = load_unpadded(C + row * C_stride + group * STATE + n, n, STATE, BLOCK_STATE).to(tl.float32)
    new_key = load_unpadded(B + row * B_stride + group * STATE + n, n, STATE, BLOCK_STATE)
    new_dt = time_step(tl.load(dt + row * dt_stride + head, mask=real, other=0.0), bias, low_limit, high_limit)
    total += new_dt * rate
    scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
    weight = tl.exp2(total[:, None] - decay) * (kept_dt * scores[None, :])
    weights_at = weights + (row * HEADS + head[:, None]) * CELL + cell[None, :]
    tl.store(weights_at, weight.to(weights.dtype.element_ty), mask=real[:, None])
    new_weight = new_dt * tl.sum(new_key.to(tl.float32) * query, 0)
    if D is not None:
        new_weight += tl.load(D + head, mask=real, other=0.0)
    scale_at = scales + (row * HEADS + head) * 2
    tl.store(scale_at, tl.exp2(total), mask=real)
    tl.store(scale_at + 1, new_weight, mask=real)
    if chunk == 0:
        tl.store(tail_B + here * STATE + n, new_key, mask=unpadded(True, n, STATE, BLOCK_STATE))
    tl.store(tail_dt + head * RING + here, new_dt, mask=real)
    tl.store(tail_decay + head * RING + here, total, mask=real)


@jit(**STEP)
def read_kernel(
    x, x_stride, C, C_stride, weights, scales, gate, gate_stride, y, y_stride, rows,
    state, state_stride, state_scales, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay,
    tail_decay_stride, tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
    CLOSING_BLOCK: tl.constexpr, CLOSING_BLOCKS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    CHUNKS: tl.constexpr = GROUPS * ((WIDTH + BLOCK * BLOCKS - 1) // (BLOCK * BLOCKS))
    CLOSING_WIDTH: tl.constexpr = CLOSING_BLOCK * CLOSING_BLOCKS
    CLOSING_CHUNKS: tl.constexpr = GROUPS * ((WIDTH + CLOSING_WIDTH - 1) // CLOSING_WIDTH)
    program = tl.program_id(0)
    if program < rows * CLOSING_CHUNKS:
        row = (program // CLOSING_CHUNKS).to(tl.int64)
        chunk = program % CLOSING_CHUNKS
        closes = tl.load(row_closing + row) >= 0
        wait(EARLY)
        if closes:
            at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
            close_columns(
                state, state_stride, state_scales, tail_input + at.tail * tail_input_stride,
                tail_B + at.tail * tail_B_stride, tail_dt + at.tail * tail_dt_stride,
                tail_decay + at.tail * tail_decay_stride, x, x_stride, at, at.closing, chunk, GROUPS, GROUP_HEADS,
                HEAD_DIM, STATE, BLOCK_STATE, CELL, RING, CLOSING_BLOCK,
                CLOSING_BLOCKS, PRECISION,
            )  # fmt: skip
    else:
        row = ((program - rows * CLOSING_CHUNKS) // CHUNKS).to(tl.int64)
        chunk = (program - rows * CLOSING_CHUNKS) % CHUNKS
        at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
        read_columns(
            x + row * x_stride, C + row * C_stride, weights + row * (GROUPS * GROUP_HEADS * CELL),
            scales + row * (GROUPS * GROUP_HEADS * 2), None if gate is None else gate + row * gate_stride,
            y + row * y_stride, state, state_stride, state_scales, tail_input + at.tail * tail_input_stride, at, chunk,
            GROUPS, GROUP_HEADS, HEAD_DIM, STATE, BLOCK_STATE, CELL, RING, HEAD_BLOCK, BLOCK, BLOCKS, STAGES,
            PRECISION, EARLY,
        )  # fmt: skip


@triton.jit
def read_columns(
    x, C, weights, scales, gate, y, state, state_stride, state_scales, tail_input, at, chunk,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute outputs of some columns of a row. All pointers but the state's point to the row's data."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    CHUNKS: tl.constexpr = (WIDTH + BLOCK * BLOCKS - 1) // (BLOCK * BLOCKS)
    group = chunk // CHUNKS
    first_column = chunk % CHUNKS * BLOCK * BLOCKS
    n = tl.arange(0, BLOCK_STATE)
    cell = tl.arange(0, CELL)
    kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
    inside = (group * STATE + n[:, None]) * WIDTH
    if BLOCKS == 1:
        # The state is older than the step: load it while the previous kernel ends.
        only_column = first_column + tl.arange(0, BLOCK)
        only = only_column[None, :]
        stored = unpadded(only < WIDTH, n[:, None], STATE, BLOCK_STATE)
        scales_at = scales_of(state_scales, group, 0, only_column, only_column < WIDTH, BLOCK_STATE, STATE, WIDTH)
        values = load_state(state, state_stride, at, inside + only, stored, CELL, scales_at)
    wait(EARLY)
    query = load_unpadded(C + group * STATE + n, n, STATE, BLOCK_STATE).to(tl.float32)
    own = first_column // HEAD_DIM + tl.arange(0, HEAD_BLOCK)
    real_head = own < GROUP_HEADS
    head = group * GROUP_HEADS + own
    weight = tl.load(weights + head[:, None] * CELL + cell[None, :], mask=real_head[:, None], other=0.0)
    through = tl.load(scales + head * 2, mask=real_head, other=0.0)
    new_weight = tl.load(scales + head * 2 + 1, mask=real_head, other=0.0)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        column = first_column + block * BLOCK + tl.arange(0, BLOCK)
        real = column < WIDTH
        if BLOCKS > 1:
            stored = unpadded(real[None, :], n[:, None], STATE, BLOCK_STATE)
            scales_at = scales_of(state_scales, group, 0, column, real, BLOCK_STATE, STATE, WIDTH)
            values = load_state(state, state_stride, at, inside + column[None, :], stored, CELL, scales_at)
        place = group * WIDTH + column
        in_tail = tail_input + place // HEAD_DIM * (RING * HEAD_DIM) + place % HEAD_DIM
        inputs = tl.load(in_tail[None, :] + ring[:, None] * HEAD_DIM, mask=kept[:, None] & real[None, :], other=0.0)
        new_x = tl.load(x + place, mask=real, other=0.0)
        if gate is not None:
            opening = tl.load(gate + place, mask=real, other=0.0).to(tl.float32)
        by_head = tl.dot(weight, inputs, input_precision=PRECISION)
        by_head += through[:, None] * tl.sum(values * query[:, None], 0)[None, :]
        by_head += new_weight[:, None] * new_x.to(tl.float32)[None, :]
        mine = own[:, None] == (column // HEAD_DIM)[None, :]
        result = tl.sum(tl.where(mine, by_head, 0.0), 0)
        result = result.to(y.dtype.element_ty)
        if gate is not None:
            # Round before gating, as a separate kernel would.
            result = (opening * tl.sigmoid(opening) * result.to(tl.float32)).to(result.dtype)
        tl.store(y + place, result, mask=real)
        tl.store(in_tail + at.start % RING * HEAD_DIM, new_x, mask=real)


@triton.jit
def close_columns(
    state, state_stride, state_scales, tail_input, tail_B, tail_dt, tail_decay, x, x_stride, at, slot, chunk,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the state at the end of a row's first cell, into a slot. Of the new tokens, only x may
    not be in the tail yet. Pointers to tails point to the row's."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    CHUNKS: tl.constexpr = (WIDTH + BLOCK * BLOCKS - 1) // (BLOCK * BLOCKS)
    group = chunk // CHUNKS
    first_column = chunk % CHUNKS * BLOCK * BLOCKS
    cell = tl.arange(0, CELL)
    earlier, ring = open_cell(at.start, at.offset, cell[None, :], CELL, RING)
    token = (at.first + tl.maximum(cell - at.offset, 0)).to(tl.int64)[None, :]
    end = (at.start - at.offset + CELL - 1) % RING
    n = tl.arange(0, BLOCK_STATE)
    keys_at = tail_B + (group * RING + tl.trans(ring)) * STATE + n[None, :]
    keys = load_unpadded(keys_at, n[None, :], STATE, BLOCK_STATE)
    # Columns come first, unlike in other matmuls here: few of them at a time take few registers.
    for block in tl.range(0, BLOCKS, num_stages=1):
        column = (first_column + block * BLOCK + tl.arange(0, BLOCK))[:, None]
        real = column < WIDTH
        head = group * GROUP_HEADS + column // HEAD_DIM
        place = group * WIDTH + column
        in_tail = tail_input + (head * RING + ring) * HEAD_DIM + column % HEAD_DIM
        inputs = tl.load(in_tail, mask=real & earlier, other=0.0)
        inputs = tl.where(earlier, inputs, tl.load(x + token * x_stride + place, mask=real & (earlier == 0), other=0.0))
        last = tl.load(tail_decay + head * RING + end, mask=real, other=0.0)
        left = tl.exp2(last - tl.load(tail_decay + head * RING + ring, mask=real, other=0.0))
        left *= tl.load(tail_dt + head * RING + ring, mask=real, other=0.0)
        inside = (group * STATE + n[None, :]) * WIDTH + column
        stored = unpadded(real, n[None, :], STATE, BLOCK_STATE)
        own = first_column + block * BLOCK + tl.arange(0, BLOCK)
        scales_at = scales_of(state_scales, group, 0, own, own < WIDTH, BLOCK_STATE, STATE, WIDTH)
        values = load_state(state, state_stride, at, inside, stored, CELL, scales_at, ACROSS=True) * tl.exp2(last)
        added = (inputs.to(tl.float32) * left).to(inputs.dtype)
        values = tl.dot(added, keys, values, input_precision=PRECISION)
        capture(state, state_stride, slot, inside, values, stored, scales_at, ACROSS=True)
