"""The state space recurrence for rows of a few tokens, such as drafts to be verified: the two kernels of a decode, for
several tokens.

    weigh    by row and some heads of a group: the weights of all tokens in the output of each new one
    read     by row and some columns of a group: the state, once for all new tokens, the tail and the outputs; and the
             state at the end of a cell that closes

All tokens of a row are computed from the checkpoint before its first one. In steps without longer rows that holds for
rows that reach the end of their cell, too, and they write the state there; in others they are left to `cells_kernel`.

A line of a matmul is a new token of one of the heads that a program's columns touch.

Triton moves the conversion of an operand to its load, where it waits. Operands that are loaded in a branch are
converted where they are used, so other loads are issued first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.launch.overlap import wait
from weft.kernels.cuda.recurrent.closing import capture, load_state, scaled, scales_of
from weft.kernels.cuda.recurrent.tails import decay_before, is_short, open_cell, place_of
from weft.kernels.cuda.ssd.steps import LOG2_E, load_unpadded, time_step, unpadded

# Tokens of a short row.
NEW = 16
# New tokens are summed in a matmul, which has at least as many.
SUMMED = tl.constexpr(16)
# New tokens that are weighed together.
TOGETHER = tl.constexpr(4)


@triton.jit
def is_taken(at, ROOM: tl.constexpr, NEW: tl.constexpr):
    """Return whether a row is short. Neither slot nor tail is negative: comparing them makes their loads early."""
    return is_short(at, ROOM, NEW) & (at.slot >= 0) & (at.tail >= 0)


@jit(**STEP)
def weigh_short(
    dt, dt_stride, A, B, B_stride, C, C_stride, dt_bias, low_limit, high_limit, weights, scales,
    state, state_stride, state_scales, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay,
    tail_decay_stride, tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (HEAD_BLOCK heads of a group, row of several tokens). Append the tokens to the tail, but for x, and write

    weights[row, head, token]  weights of each token of the cell, then of each new one; 0 beyond the tail
    scales[row, head, token]   decay of the checkpoint
    """
    HEADS: tl.constexpr = GROUPS * GROUP_HEADS
    CHUNKS: tl.constexpr = (GROUP_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    group, chunk, row = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS, tl.program_id(1)
    at = place_of(row + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_taken(at, ROOM, NEW):
        # Load what is older than the step.
        cell, new, count = tl.arange(0, CELL), tl.arange(0, SUMMED), at.end - at.start
        kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
        tail_B += at.tail * tail_B_stride + group * (RING * STATE)
        keys = ()
        for low in tl.static_range(0, BLOCK_STATE, PART):
            keys += (tail_keys(tail_B, at, kept, ring, low, STATE, BLOCK_STATE, CELL, PART),)
        own = chunk * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        real, head = own < GROUP_HEADS, group * GROUP_HEADS + own
        steps_at = tail_dt + at.tail * tail_dt_stride + head * RING
        decays_at = tail_decay + at.tail * tail_decay_stride + head * RING
        known = real[:, None] & kept[None, :]
        decay = tl.load(decays_at[:, None] + ring[None, :], known, float("inf"))
        kept_dt = tl.load(steps_at[:, None] + ring[None, :], known, 0.0)
        total = decay_before(decays_at, at, real, RING)
        rate = tl.load(A + head, real, 0.0) * LOG2_E
        bias = None if dt_bias is None else tl.load(dt_bias + head, real, 0.0)[:, None]

        wait(EARLY)
        known_new = real[:, None] & (new < count)[None, :]
        token = (at.first + new).to(tl.int64)
        raw = tl.load(dt + token[None, :] * dt_stride + head[:, None], known_new, 0.0)
        # Twice as many keys as queries: for matmuls with fewer columns, every warp would compute all of them.
        wide = tl.arange(0, 2 * SUMMED)
        key_at = B + (at.first + wide).to(tl.int64)[:, None] * B_stride + group * STATE
        query_at = C + token[:, None] * C_stride + group * STATE
        of_tail, of_new = tl.zeros([SUMMED, CELL], tl.float32), tl.zeros([SUMMED, 2 * SUMMED], tl.float32)
        for low in tl.static_range(0, BLOCK_STATE, PART):
            n = (low + tl.arange(0, PART))[None, :]
            is_key = unpadded((wide < count)[:, None], n, STATE, BLOCK_STATE)
            new_keys = tl.load(key_at + n, is_key, 0.0)
            queries = tl.load(query_at + n, unpadded((new < count)[:, None], n, STATE, BLOCK_STATE), 0.0)
            of_tail = tl.dot(queries, tl.trans(keys[low // PART]), of_tail, input_precision=PRECISION)
            of_new = tl.dot(queries, tl.trans(new_keys), of_new, input_precision=PRECISION)
            if chunk == 0:
                tl.store(tail_B + ((at.start + wide) % RING)[:, None] * STATE + n, new_keys, is_key)

        steps = tl.where(known_new, time_step(raw, bias, low_limit, high_limit), 0.0)
        of_new = tl.sum(tl.reshape(of_new, (SUMMED, 2, SUMMED)), 1)
        totals, decays = tl.zeros([HEAD_BLOCK, SUMMED], tl.float32), tl.zeros([HEAD_BLOCK, SUMMED], tl.float32)
        # Tails count from the start of a token's own cell, weights from that of the row's first.
        in_cell = total
        for number in range(count):
            here = (new == number)[None, :]
            step = tl.sum(tl.where(here, steps, 0.0), 1)
            total += step * rate
            in_cell = tl.where(at.offset + number == CELL, 0.0, in_cell) + step * rate
            totals = tl.where(here, total[:, None], totals)
            decays = tl.where(here, in_cell[:, None], decays)
        for first in range(0, count, TOGETHER):
            line = first + tl.arange(0, TOGETHER)
            chosen = new // TOGETHER == first // TOGETHER
            line_total = tl.trans(chosen_lines(tl.trans(totals), chosen))
            place = (row * HEADS + head).to(tl.int64)[:, None] * NEW + line[None, :]
            written = real[:, None] & (line < count)[None, :]
            tl.store(scales + place, tl.exp2(line_total), written)
            weight_at, written = weights + place[:, :, None] * (CELL + NEW), written[:, :, None]
            since = tl.exp2(line_total[:, :, None] - decay[:, None, :])
            weight = since * (kept_dt[:, None, :] * chosen_lines(of_tail, chosen)[None, :, :])
            tl.store(weight_at + cell[None, None, :], weight.to(weights.dtype.element_ty), written)
            # Later tokens decay by a number that is finite.
            since = tl.exp2(tl.minimum(line_total[:, :, None] - totals[:, None, :], 0.0))
            scores = tl.where(new[None, :] <= line[:, None], chosen_lines(of_new, chosen), 0.0)
            weight = since * (steps[:, None, :] * scores[None, :, :])
            weight_at += CELL + new[None, None, :]
            tl.store(weight_at, weight.to(weights.dtype.element_ty), written & (new < NEW)[None, None, :])
        here = (at.start + new) % RING
        tl.store(steps_at[:, None] + here[None, :], steps, known_new)
        tl.store(decays_at[:, None] + here[None, :], decays, known_new)
    else:
        wait(EARLY)


@triton.jit
def tail_keys(
    tail_B, at, kept, ring, low, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, PART: tl.constexpr
):
    """Load PART numbers of every key in a row's tail, if it holds any."""
    n = (low + tl.arange(0, PART))[None, :]
    if at.offset > 0:
        keys = tl.load(tail_B + ring[:, None] * STATE + n, unpadded(kept[:, None], n, STATE, BLOCK_STATE), 0.0)
    else:
        keys = tl.zeros([CELL, PART], tail_B.dtype.element_ty)
    return keys


@triton.jit
def chosen_lines(x, chosen):
    """Return TOGETHER adjacent lines of SUMMED."""
    kept = tl.where(chosen[:, None], x, 0.0)
    return tl.sum(tl.reshape(kept, (SUMMED // TOGETHER, TOGETHER, x.shape[1])), 0)


@jit(**STEP)
def short_kernel(
    x, x_stride, C, C_stride, D, weights, scales, y, y_stride,
    state, state_stride, state_scales, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay,
    tail_decay_stride, tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr,
    TOUCHED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, CLOSED: tl.constexpr, ALONE: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program of BLOCK columns of a group in one row. If it runs ALONE, it closes cells, and rows that are not short
    are padding."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row, chunk = tl.program_id(0) // (GROUPS * CHUNKS), tl.program_id(0) % (GROUPS * CHUNKS)
    group, first_column = chunk // CHUNKS, chunk % CHUNKS * BLOCK
    at = place_of(row + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_taken(at, ROOM, NEW):
        tail_input += at.tail * tail_input_stride
        read_short(
            x, x_stride, C, C_stride, D, weights, scales, y, y_stride, state, state_stride, state_scales, tail_input,
            at, row, group, first_column, GROUPS, GROUP_HEADS, HEAD_DIM, STATE, BLOCK_STATE, CELL, RING, NEW, LINES,
            BLOCK, PRECISION, EARLY,
        )  # fmt: skip
        slot = -1
        if ALONE and at.offset + at.end - at.start >= CELL:
            slot = tl.load(piece_slot + tl.load(first_piece + row))
        if slot >= 0:
            close_short(
                state, state_stride, tail_input, tail_B + at.tail * tail_B_stride,
                tail_dt + at.tail * tail_dt_stride, tail_decay + at.tail * tail_decay_stride, x, x_stride, at, slot,
                group, first_column, GROUP_HEADS, HEAD_DIM, STATE, BLOCK_STATE, CELL, RING, TOUCHED, CLOSED, BLOCK,
                PRECISION,
            )  # fmt: skip
    else:
        wait(EARLY)
        if ALONE:
            # Padding has finite outputs.
            column = first_column + tl.arange(0, BLOCK)
            for number in range(at.end - at.start):
                y_at = y + (at.first + number).to(tl.int64) * y_stride + group * WIDTH + column
                tl.store(y_at, tl.zeros([BLOCK], y.dtype.element_ty), column < WIDTH)


@triton.jit
def read_short(
    x, x_stride, C, C_stride, D, weights, scales, y, y_stride, state, state_stride, state_scales, tail_input, at, row,
    group, first_column,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, NEW: tl.constexpr, LINES: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a row's outputs, and append x to its tail."""
    wait(EARLY)
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    n, cell, new, line = tl.arange(0, BLOCK_STATE), tl.arange(0, CELL), tl.arange(0, SUMMED), tl.arange(0, LINES)
    column = first_column + tl.arange(0, BLOCK)
    real, place, count = column < WIDTH, group * WIDTH + column, at.end - at.start
    own, number = first_column // HEAD_DIM + line // NEW, line % NEW
    used, token = (own < GROUP_HEADS) & (number < count), (at.first + number).to(tl.int64)
    head = group * GROUP_HEADS + own
    mine = (used[:, None] & (own[:, None] == (column // HEAD_DIM)[None, :])) & real[None, :]
    if D is not None:
        own_input = tl.load(x + token[:, None] * x_stride + place[None, :], mine, 0.0)
        skip = tl.load(D + head, used, 0.0)
    weighed = ((row * (GROUPS * GROUP_HEADS) + head) * NEW + number).to(tl.int64)
    scale = tl.load(scales + weighed, used, 0.0)
    kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
    in_tail = tail_input + place // HEAD_DIM * (RING * HEAD_DIM) + place % HEAD_DIM
    earlier = tl.load(in_tail[None, :] + ring[:, None] * HEAD_DIM, kept[:, None] & real[None, :], 0.0)
    is_new = (new < count)[:, None] & real[None, :]
    inputs = tl.load(x + (at.first + new).to(tl.int64)[:, None] * x_stride + place[None, :], is_new, 0.0)
    weight_at = weights + weighed[:, None] * (CELL + NEW)
    of_tail = tl.load(weight_at + cell[None, :], used[:, None], 0.0)
    of_new = tl.load(weight_at + CELL + new[None, :], used[:, None] & (new < NEW)[None, :], 0.0)
    query_at = C + token[:, None] * C_stride + group * STATE + n[None, :]
    queries = tl.load(query_at, unpadded(used[:, None], n[None, :], STATE, BLOCK_STATE), 0.0)
    # In a branch, a state is rounded before it goes through shared memory, and its loads stay together.
    if at.start >= CELL:
        inside = (group * STATE + n[:, None]) * WIDTH + column[None, :]
        stored = unpadded(real[None, :], n[:, None], STATE, BLOCK_STATE)
        values = tl.load(state + at.slot * state_stride + inside, stored, 0.0).to(tl.float32)
        if state_scales is not None:
            scales_at = scales_of(state_scales, group, 0, column, real, BLOCK_STATE, STATE, WIDTH)
            values = scaled(values, tl.load(scales_at.place + at.slot * (state_stride // 2), scales_at.real, 0.0))
    else:
        values = tl.zeros([BLOCK_STATE, BLOCK], tl.float32)

    outputs = tl.dot(queries, values.to(queries.dtype), input_precision=PRECISION) * scale[:, None]
    outputs = tl.dot(of_tail, earlier, outputs, input_precision=PRECISION)
    outputs = tl.dot(of_new, inputs, outputs, input_precision=PRECISION)
    if D is not None:
        outputs += skip[:, None] * own_input.to(tl.float32)
    tl.store(y + token[:, None] * y_stride + place[None, :], outputs.to(y.dtype.element_ty), mine)
    tl.store(in_tail[None, :] + ((at.start + new) % RING)[:, None] * HEAD_DIM, inputs, is_new)


@triton.jit
def close_short(
    state, state_stride, tail_input, tail_B, tail_dt, tail_decay, x, x_stride, at, slot, group, first_column,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, TOUCHED: tl.constexpr, CLOSED: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the state at the end of a row's first cell, into a slot, CLOSED lines at a time. Of the
    new tokens, only x may not be in the tail yet. Pointers to tails point to the row's."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    cell, column = tl.arange(0, CELL), first_column + tl.arange(0, BLOCK)
    real, place = column < WIDTH, group * WIDTH + column
    earlier, ring = open_cell(at.start, at.offset, cell, CELL, RING)
    in_tail = tail_input + place // HEAD_DIM * (RING * HEAD_DIM) + place % HEAD_DIM
    inputs = tl.load(in_tail[None, :] + ring[:, None] * HEAD_DIM, earlier[:, None] & real[None, :], 0.0)
    token = (at.first + tl.maximum(cell - at.offset, 0)).to(tl.int64)
    in_step = (earlier == 0)[:, None] & real[None, :]
    inputs = tl.where(in_step, tl.load(x + token[:, None] * x_stride + place[None, :], in_step, 0.0), inputs)
    # Each column has the decays of its head.
    left, through = tl.zeros([CELL, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOUCHED):
        own = first_column // HEAD_DIM + number
        at_head = (group * GROUP_HEADS + tl.minimum(own, GROUP_HEADS - 1)) * RING
        last = tl.load(tail_decay + at_head + (at.start - at.offset + CELL - 1) % RING)
        since = tl.exp2(last - tl.load(tail_decay + at_head + ring)) * tl.load(tail_dt + at_head + ring)
        mine = column // HEAD_DIM == own
        left = tl.where(mine[None, :], since[:, None], left)
        through = tl.where(mine, tl.exp2(last), through)
    added = (inputs.to(tl.float32) * left).to(inputs.dtype)
    for low in tl.static_range(0, BLOCK_STATE, CLOSED):
        n = (low + tl.arange(0, CLOSED))[:, None]
        stored = unpadded(real[None, :], n, STATE, BLOCK_STATE)
        keys = load_unpadded(tail_B + (group * RING + ring)[None, :] * STATE + n, n, STATE, BLOCK_STATE)
        inside = (group * STATE + n) * WIDTH + column[None, :]
        values = load_state(state, state_stride, at, inside, stored, CELL) * through[None, :]
        values = tl.dot(keys, added, values, input_precision=PRECISION)
        capture(state, state_stride, slot, inside, values, stored)
