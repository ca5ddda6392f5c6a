"""Decodes of the state space recurrence: one token a row, the state read once and, but for closing cells, not written.

A program takes some columns (a column is one number of a head's x) of one group of one row. What differs
by head is computed for all heads that these columns touch, and each column picks its own: heads may have any width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.overlap import wait
from weft.kernels.cuda.ssd_steps import LOG2_E, time_step


@triton.jit
def decode_kernel(
    x, dt, A, B, C, D, dt_bias, y,
    state, tail_x, tail_B, tail_dt, tail_decay,
    start, slots, tails,
    x_stride, dt_stride, B_stride, C_stride, slot_stride, x_unit, B_unit, dt_unit, decay_unit,
    low_limit, high_limit,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    CHUNKS: tl.constexpr = (WIDTH + BLOCK * BLOCKS - 1) // (BLOCK * BLOCKS)
    row = tl.program_id(1)
    group = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    first_column = chunk * BLOCK * BLOCKS
    first_head = first_column // HEAD_DIM

    position = tl.load(start + row)
    slot = tl.load(slots + row).to(tl.int64)
    tail = tl.load(tails + row).to(tl.int64)
    offset = position % CELL
    has_state = position >= CELL
    here = position % RING

    # What is older than the step: the open cell before the new token, and, if there is one block only, the state.
    cell = tl.arange(0, CELL)
    kept = cell < offset
    ring = (position - offset + cell) % RING
    n = tl.arange(0, STATE)
    in_state = state + slot * slot_stride + (group * STATE + n[:, None]) * WIDTH
    if BLOCKS == 1:
        only = first_column + tl.arange(0, BLOCK)
        values = tl.load(in_state + only[None, :], mask=has_state & (only < WIDTH)[None, :], other=0.0)
    key_at = tail_B + tail * B_unit + ring[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
    keys = tl.load(key_at, mask=kept[:, None], other=0.0)
    own_head = first_head + tl.arange(0, HEAD_BLOCK)
    real_head = own_head < GROUP_HEADS
    head = group * GROUP_HEADS + own_head
    at = ring[None, :] * (GROUPS * GROUP_HEADS) + head[:, None]
    known = real_head[:, None] & kept[None, :]
    decay = tl.load(tail_decay + tail * decay_unit + at, mask=known, other=float("inf"))
    kept_dt = tl.load(tail_dt + tail * dt_unit + at, mask=known, other=0.0)
    before = tail_decay + tail * decay_unit + ((position - 1) % RING) * (GROUPS * GROUP_HEADS) + head
    total = tl.load(before, mask=real_head & (offset > 0), other=0.0)
    rate = tl.load(A + head, mask=real_head, other=0.0) * LOG2_E
    bias = None if dt_bias is None else tl.load(dt_bias + head, mask=real_head, other=0.0)

    # By head: how much of the state and of each token is left, and what each token weighs.
    wait(EARLY)
    token = row.to(tl.int64)
    query = tl.load(C + token * C_stride + group * STATE + n).to(tl.float32)
    new_key = tl.load(B + token * B_stride + group * STATE + n)
    raw = tl.load(dt + token * dt_stride + head, mask=real_head, other=0.0)
    new_dt = time_step(raw, bias, low_limit, high_limit)
    total += new_dt * rate
    through = tl.exp2(total)
    scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
    weights = tl.exp2(total[:, None] - decay) * (kept_dt * scores[None, :])
    weights = weights.to(tail_x.dtype.element_ty)
    new_weight = new_dt * tl.sum(new_key.to(tl.float32) * query, 0)
    if D is not None:
        new_weight += tl.load(D + head, mask=real_head, other=0.0)

    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        column = first_column + block * BLOCK + tl.arange(0, BLOCK)
        real = column < WIDTH
        if BLOCKS > 1:
            values = tl.load(in_state + column[None, :], mask=has_state & real[None, :], other=0.0)
        x_at = tail_x + tail * x_unit + ring[:, None] * (GROUPS * WIDTH) + group * WIDTH + column[None, :]
        inputs = tl.load(x_at, mask=kept[:, None] & real[None, :], other=0.0)
        new_x = tl.load(x + token * x_stride + group * WIDTH + column, mask=real, other=0.0)
        by_head = tl.dot(weights, inputs, input_precision=PRECISION)
        by_head += through[:, None] * tl.sum(values * query[:, None], 0)[None, :]
        by_head += new_weight[:, None] * new_x.to(tl.float32)[None, :]
        mine = own_head[:, None] == (column // HEAD_DIM)[None, :]
        result = tl.sum(tl.where(mine, by_head, 0.0), 0)
        y_at = y + (token * GROUPS + group) * WIDTH + column
        tl.store(y_at, result.to(y.dtype.element_ty), mask=real)
        new_at = tail_x + tail * x_unit + here * (GROUPS * WIDTH) + group * WIDTH + column
        tl.store(new_at, new_x, mask=real)

    if chunk == 0:
        tl.store(tail_B + tail * B_unit + here * (GROUPS * STATE) + group * STATE + n, new_key)
    # A head's numbers are written by the program that has its first column.
    starts = own_head * HEAD_DIM
    owned = real_head & (starts >= first_column) & (starts < first_column + BLOCK * BLOCKS)
    tl.store(tail_dt + tail * dt_unit + here * (GROUPS * GROUP_HEADS) + head, new_dt, mask=owned)
    tl.store(tail_decay + tail * decay_unit + here * (GROUPS * GROUP_HEADS) + head, total, mask=owned)


@triton.jit
def close_kernel(
    state, tail_x, tail_B, tail_dt, tail_decay,
    start, slots, tails, closing,
    slot_stride, x_unit, B_unit, dt_unit, decay_unit,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """After the decodes: the state at the end of each cell that closes, all of whose tokens are in the tail by now."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    CHUNKS: tl.constexpr = (WIDTH + BLOCK * BLOCKS - 1) // (BLOCK * BLOCKS)
    row = tl.program_id(1)
    target = tl.load(closing + row).to(tl.int64)
    wait(EARLY)
    if target >= 0:
        group = tl.program_id(0) // CHUNKS
        first_column = tl.program_id(0) % CHUNKS * BLOCK * BLOCKS
        position = tl.load(start + row)
        slot = tl.load(slots + row).to(tl.int64)
        tail = tl.load(tails + row).to(tl.int64)
        ring = (position - (CELL - 1) + tl.arange(0, CELL)) % RING
        n = tl.arange(0, STATE)
        key_at = tail_B + tail * B_unit + ring[None, :] * (GROUPS * STATE) + group * STATE + n[:, None]
        keys = tl.load(key_at)
        for block in tl.range(0, BLOCKS, num_stages=1):
            column = first_column + block * BLOCK + tl.arange(0, BLOCK)
            real = (column < WIDTH)[None, :]
            head = group * GROUP_HEADS + column // HEAD_DIM
            decay_at = tail_decay + tail * decay_unit + head
            last = tl.load(decay_at + (position % RING) * (GROUPS * GROUP_HEADS), mask=column < WIDTH, other=0.0)
            decay = tl.load(decay_at[None, :] + ring[:, None] * (GROUPS * GROUP_HEADS), mask=real, other=0.0)
            dt_at = tail_dt + tail * dt_unit + ring[:, None] * (GROUPS * GROUP_HEADS) + head[None, :]
            left = tl.exp2(last[None, :] - decay) * tl.load(dt_at, mask=real, other=0.0)
            x_at = tail_x + tail * x_unit + ring[:, None] * (GROUPS * WIDTH) + group * WIDTH + column[None, :]
            inputs = tl.load(x_at, mask=real, other=0.0)
            inside = (group * STATE + n[:, None]) * WIDTH + column[None, :]
            values = tl.load(state + slot * slot_stride + inside, mask=real & (position >= CELL), other=0.0)
            added = (inputs.to(tl.float32) * left).to(inputs.dtype)
            values = tl.dot(keys, added, values * tl.exp2(last)[None, :], input_precision=PRECISION)
            tl.store(state + target * slot_stride + inside, values, mask=real)
