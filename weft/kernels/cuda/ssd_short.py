"""The state space recurrence for rows of a few tokens, such as drafts to be verified: the two kernels of a decode, for
several tokens.

    weigh    by row and some heads of a group: the weights of all tokens in the output of each new one
    read     by row and some columns of a group: the state, once for all new tokens, the tail and the outputs; and, as
             programs that come first and mostly end at once, the states of cells that close

All tokens of a row are computed from the checkpoint before its first one. In steps without longer rows that holds for
rows that reach the end of their cell, too, and they write the state there; in others they are left to `cells_kernel`.

A line of a matmul is a new token of one of the heads that a program's columns touch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.arguments import STEP
from weft.kernels.cuda.closing import load_state
from weft.kernels.cuda.launching import jit
from weft.kernels.cuda.overlap import wait
from weft.kernels.cuda.ssd_decode import close_columns
from weft.kernels.cuda.ssd_steps import LOG2_E, load_unpadded, time_step, unpadded
from weft.kernels.cuda.tails import decay_before, is_short, open_cell, place_of

# Tokens of a short row.
NEW = 16
# New tokens are summed in a matmul, which has at least as many.
SUMMED = tl.constexpr(16)


@jit(**STEP)
def weigh_short(
    dt, dt_stride, A, B, B_stride, C, C_stride, dt_bias, low_limit, high_limit, weights, scales,
    state, state_stride, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay, tail_decay_stride,
    tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (HEAD_BLOCK heads of a group, row of several tokens). Append the tokens to the tail, but for x, and write

    weights[row, head, token]  weights of each token of the tail, then of each new one; undefined beyond the tail
    scales[row, head, token]   decay of the checkpoint
    """
    HEADS: tl.constexpr = GROUPS * GROUP_HEADS
    CHUNKS: tl.constexpr = (GROUP_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    group, chunk, row = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS, tl.program_id(1)
    at = place_of(row + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, ROOM, NEW):
        # Load what is older than the step.
        n, cell, new = tl.arange(0, BLOCK_STATE), tl.arange(0, CELL), tl.arange(0, NEW)
        kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
        tail_B += at.tail * tail_B_stride + group * (RING * STATE)
        known_keys = unpadded(kept[:, None], n[None, :], STATE, BLOCK_STATE)
        keys = tl.load(tail_B + ring[:, None] * STATE + n[None, :], known_keys, 0.0)
        own = chunk * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        real, head = own < GROUP_HEADS, group * GROUP_HEADS + own
        steps_at = tail_dt + at.tail * tail_dt_stride + head * RING
        decays_at = tail_decay + at.tail * tail_decay_stride + head * RING
        known = real[:, None] & kept[None, :]
        decay = tl.load(decays_at[:, None] + ring[None, :], known, float("inf"))
        kept_dt = tl.load(steps_at[:, None] + ring[None, :], known, 0.0)
        total = decay_before(decays_at, at, real, RING)
        rate = tl.load(A + head, real, 0.0) * LOG2_E
        bias = None if dt_bias is None else tl.load(dt_bias + head, real, 0.0)

        wait(EARLY)
        B += group * STATE
        C += group * STATE
        is_new = unpadded((new < at.end - at.start)[:, None], n[None, :], STATE, BLOCK_STATE)
        new_keys = tl.load(B + (at.first + new).to(tl.int64)[:, None] * B_stride + n[None, :], is_new, 0.0)
        # Of the new tokens so far; the others have a time step of 0.
        totals, steps = tl.zeros([HEAD_BLOCK, NEW], tl.float32), tl.zeros([HEAD_BLOCK, NEW], tl.float32)
        # Tails count from the start of a token's own cell, weights from that of the row's first.
        in_cell = total
        place = (row * HEADS + head).to(tl.int64) * NEW
        for number in range(at.end - at.start):
            token = (at.first + number).to(tl.int64)
            query = load_unpadded(C + token * C_stride + n, n, STATE, BLOCK_STATE).to(tl.float32)
            step = time_step(tl.load(dt + token * dt_stride + head, real, 0.0), bias, low_limit, high_limit)
            total += step * rate
            in_cell = tl.where(at.offset + number == CELL, 0.0, in_cell) + step * rate
            totals = tl.where(new[None, :] == number, total[:, None], totals)
            steps = tl.where(new[None, :] == number, step[:, None], steps)
            scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
            weight_at = weights + (place + number)[:, None] * (CELL + NEW)
            weight = tl.exp2(total[:, None] - decay) * (kept_dt * scores[None, :])
            tl.store(weight_at + cell[None, :], weight.to(weights.dtype.element_ty), known)
            scores = tl.sum(new_keys.to(tl.float32) * query[None, :], 1)
            # Later tokens decay by a number that is finite.
            weight = tl.exp2(tl.minimum(total[:, None] - totals, 0.0)) * (steps * scores[None, :])
            tl.store(weight_at + CELL + new[None, :], weight.to(weights.dtype.element_ty), real[:, None])
            tl.store(scales + place + number, tl.exp2(total), real)
            here = (at.start + number) % RING
            tl.store(steps_at + here, step, real)
            tl.store(decays_at + here, in_cell, real)
        if chunk == 0:
            tl.store(tail_B + ((at.start + new) % RING)[:, None] * STATE + n[None, :], new_keys, is_new)
    else:
        wait(EARLY)


@jit(**STEP)
def short_kernel(
    x, x_stride, C, C_stride, D, weights, scales, y, y_stride, rows,
    state, state_stride, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay, tail_decay_stride,
    tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, CLOSING_BLOCK: tl.constexpr, CLOSING_BLOCKS: tl.constexpr,
    ALONE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program of BLOCK columns of a group in one row, or, before those, of columns to close. If it runs ALONE, rows
    that are not short are padding."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    CHUNKS: tl.constexpr = GROUPS * ((WIDTH + BLOCK - 1) // BLOCK)
    CLOSING_WIDTH: tl.constexpr = CLOSING_BLOCK * CLOSING_BLOCKS
    CLOSING_CHUNKS: tl.constexpr = GROUPS * ((WIDTH + CLOSING_WIDTH - 1) // CLOSING_WIDTH)
    program = tl.program_id(0)
    closing = rows * CLOSING_CHUNKS if ALONE else 0
    if program < closing:
        row = program // CLOSING_CHUNKS
        at = place_of(row + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
        # A row without tokens has no piece.
        closes = is_short(at, ROOM, NEW) & (at.offset + at.end - at.start >= CELL)
        slot = tl.load(piece_slot + tl.load(first_piece + row), closes, -1)
        wait(EARLY)
        if slot >= 0:
            close_columns(
                state, state_stride, tail_input + at.tail * tail_input_stride, tail_B + at.tail * tail_B_stride,
                tail_dt + at.tail * tail_dt_stride, tail_decay + at.tail * tail_decay_stride, x, x_stride, at,
                slot, program % CLOSING_CHUNKS, GROUPS, GROUP_HEADS, HEAD_DIM, STATE, BLOCK_STATE, CELL, RING,
                CLOSING_BLOCK, CLOSING_BLOCKS, PRECISION,
            )  # fmt: skip
    else:
        row, chunk = (program - closing) // CHUNKS, (program - closing) % CHUNKS
        at = place_of(row + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
        group, first_column = chunk // (CHUNKS // GROUPS), chunk % (CHUNKS // GROUPS) * BLOCK
        if is_short(at, ROOM, NEW):
            read_short(
                x, x_stride, C, C_stride, D, weights, scales, y, y_stride, state, state_stride,
                tail_input + at.tail * tail_input_stride, at, row, group, first_column,
                GROUPS, GROUP_HEADS, HEAD_DIM, STATE, BLOCK_STATE, CELL, RING, NEW, LINES, BLOCK, PRECISION, EARLY,
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
    x, x_stride, C, C_stride, D, weights, scales, y, y_stride, state, state_stride, tail_input, at, row, group,
    first_column,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, NEW: tl.constexpr, LINES: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a row's outputs, and append x to its tail."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    # The state takes longest, and is older than the step.
    n, cell = tl.arange(0, BLOCK_STATE), tl.arange(0, CELL)
    column = first_column + tl.arange(0, BLOCK)
    real = column < WIDTH
    inside = (group * STATE + n[:, None]) * WIDTH + column[None, :]
    stored = unpadded(real[None, :], n[:, None], STATE, BLOCK_STATE)
    values = load_state(state, state_stride, at, inside, stored, CELL)

    wait(EARLY)
    kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
    place, count = group * WIDTH + column, at.end - at.start
    in_tail = tail_input + place // HEAD_DIM * (RING * HEAD_DIM) + place % HEAD_DIM
    earlier = tl.load(in_tail[None, :] + ring[:, None] * HEAD_DIM, kept[:, None] & real[None, :], 0.0)
    new = tl.arange(0, SUMMED)
    is_new = (new < count)[:, None] & real[None, :]
    inputs = tl.load(x + (at.first + new).to(tl.int64)[:, None] * x_stride + place[None, :], is_new, 0.0)
    line = tl.arange(0, LINES)
    own, number = first_column // HEAD_DIM + line // NEW, line % NEW
    used, token = (own < GROUP_HEADS) & (number < count), (at.first + number).to(tl.int64)
    query_at = C + token[:, None] * C_stride + group * STATE + n[None, :]
    queries = tl.load(query_at, unpadded(used[:, None], n[None, :], STATE, BLOCK_STATE), 0.0)
    head = group * GROUP_HEADS + own
    weighed = ((row * (GROUPS * GROUP_HEADS) + head) * NEW + number).to(tl.int64)
    scale = tl.load(scales + weighed, used, 0.0)
    weight_at = weights + weighed[:, None] * (CELL + NEW)
    of_tail = tl.load(weight_at + cell[None, :], used[:, None] & kept[None, :], 0.0)
    of_new = tl.load(weight_at + CELL + new[None, :], used[:, None] & (new < count)[None, :], 0.0)

    outputs = tl.dot(queries, values.to(queries.dtype), input_precision=PRECISION) * scale[:, None]
    outputs = tl.dot(of_tail, earlier, outputs, input_precision=PRECISION)
    outputs = tl.dot(of_new, inputs, outputs, input_precision=PRECISION)
    mine = (used[:, None] & (own[:, None] == (column // HEAD_DIM)[None, :])) & real[None, :]
    if D is not None:
        own_input = tl.load(x + token[:, None] * x_stride + place[None, :], mine, 0.0).to(tl.float32)
        outputs += tl.load(D + head, used, 0.0)[:, None] * own_input
    tl.store(y + token[:, None] * y_stride + place[None, :], outputs.to(y.dtype.element_ty), mine)
    tl.store(in_tail[None, :] + ((at.start + new) % RING)[:, None] * HEAD_DIM, inputs, is_new)
