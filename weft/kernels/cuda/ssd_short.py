"""The state space recurrence for rows of a few tokens, such as drafts to be verified.

It follows `steps_kernel`, like `cells_kernel`, in two kernels: the first computes what the columns of a head share, the
second reads states and sums. All tokens of a row are computed from the checkpoint before its first one. In steps
without longer rows that holds for rows that reach the end of their cell, too, and they write the state there; in others
they are left to `cells_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.arguments import STEP
from weft.kernels.cuda.closing import capture, load_state
from weft.kernels.cuda.launching import jit
from weft.kernels.cuda.ssd_extend import load_opened
from weft.kernels.cuda.ssd_steps import unpadded
from weft.kernels.cuda.tails import is_short, open_cell, place_of

# Tokens of a short row: as many lines as the narrowest matmul has.
NEW = 16
# Lines of a state that are closed at a time.
CLOSED = tl.constexpr(32)


@triton.jit
def load_steps(steps, totals, step_at, at, line, CELL: tl.constexpr):
    """Load numbers of a row's tokens, which count from the start of its first cell also after its end."""
    column = at.offset + line
    is_new, is_later = line < at.end - at.start, column >= CELL
    # Pieces of a row lie together.
    found = tl.load(steps + step_at + column, is_new, 0.0)
    last = tl.load(totals + step_at + CELL - 1 + tl.zeros_like(line), is_new & is_later, 0.0)
    return tl.where(is_later, found + last, found)


@jit(**STEP)
def weigh_short(
    B, B_stride, C, C_stride, totals, shifted, weights, scales,
    state, state_stride, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay, tail_decay_stride,
    tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    CELL: tl.constexpr, BLOCK_CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (HEAD_BLOCK heads of a group, row of several tokens). A line is a new token. Write

    weights[row, head]  weights of each token of the tail, then of each new one; undefined beyond the tail
    scales[row, head]   decay of the checkpoint
    """
    BLOCKS: tl.constexpr = (GROUP_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    group, own = tl.program_id(0) // BLOCKS, tl.program_id(1)
    at = place_of(own + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, ROOM, NEW):
        n, line, cell = tl.arange(0, BLOCK_STATE), tl.arange(0, NEW), tl.arange(0, BLOCK_CELL)
        is_new, token = line < at.end - at.start, (at.first + line).to(tl.int64)
        kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
        real = unpadded(is_new[:, None], n[None, :], STATE, BLOCK_STATE)
        queries = tl.load(C + token[:, None] * C_stride + group * STATE + n[None, :], real, 0.0)
        keys = tl.load(B + token[:, None] * B_stride + group * STATE + n[None, :], real, 0.0)
        tail_at = tail_B + at.tail * tail_B_stride + (group * RING + ring[:, None]) * STATE + n[None, :]
        tail_keys = tl.load(tail_at, unpadded(kept[:, None], n[None, :], STATE, BLOCK_STATE), 0.0)
        scores = tl.dot(queries, tl.trans(tail_keys), input_precision=PRECISION)
        among = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        piece = tl.load(first_piece + own)
        first = group * GROUP_HEADS + tl.program_id(0) % BLOCKS * HEAD_BLOCK
        for head in range(first, tl.minimum(first + HEAD_BLOCK, (group + 1) * GROUP_HEADS)):
            step_at = (head * pieces + piece).to(tl.int64) * CELL
            total = load_steps(totals, totals, step_at, at, line, CELL)
            since = tl.load(shifted + step_at + cell, kept, 0.0)
            # A line also reads its own token, and none after it.
            since_new = load_steps(shifted, totals, step_at, at, line, CELL)
            seen = (line[:, None] >= line[None, :]) & is_new[:, None]
            place = (own * (GROUPS * GROUP_HEADS) + head).to(tl.int64)
            tl.store(scales + place * NEW + line, tl.exp2(total))
            found = scores * tl.exp2(tl.where(kept[None, :], total[:, None] - since[None, :], float("-inf")))
            weight_at = weights + place * (NEW * (BLOCK_CELL + NEW)) + line[:, None] * (BLOCK_CELL + NEW)
            tl.store(weight_at + cell[None, :], found.to(weights.dtype.element_ty), kept[None, :])
            found = among * tl.exp2(tl.where(seen, total[:, None] - since_new[None, :], float("-inf")))
            tl.store(weight_at + BLOCK_CELL + line[None, :], found.to(weights.dtype.element_ty))


@jit(**STEP)
def short_kernel(
    x, x_stride, B, B_stride, C, C_stride, D, y, y_stride, totals, left, weights, scales,
    state, state_stride, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay, tail_decay_stride,
    tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, BLOCK_CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr,
    NEW: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns of a head, row of several tokens). If it runs ALONE, other rows are padding."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK - 1) // BLOCK
    head, own = tl.program_id(0) // BLOCKS, tl.program_id(1)
    group = head // GROUP_HEADS
    at = place_of(own + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    real = column < HEAD_DIM
    y += head * HEAD_DIM
    if is_short(at, ROOM, NEW):
        # The state takes longest, so it is loaded first.
        n, line, cell = tl.arange(0, BLOCK_STATE), tl.arange(0, NEW), tl.arange(0, BLOCK_CELL)
        stored = unpadded(real[None, :], n[:, None], STATE, BLOCK_STATE)
        inside = (group * STATE + n[:, None]) * WIDTH + (head % GROUP_HEADS) * HEAD_DIM + column[None, :]
        values = load_state(state, state_stride, at, inside, stored, CELL)

        is_new, token = line < at.end - at.start, (at.first + line).to(tl.int64)
        kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
        tail_input += at.tail * tail_input_stride + head * (RING * HEAD_DIM)
        x += head * HEAD_DIM
        tail_at = tail_input + ring[:, None] * HEAD_DIM + column[None, :]
        earlier = tl.load(tail_at, kept[:, None] & real[None, :], 0.0)
        inputs = tl.load(x + token[:, None] * x_stride + column[None, :], is_new[:, None] & real[None, :], 0.0)
        query_at = C + token[:, None] * C_stride + group * STATE + n[None, :]
        queries = tl.load(query_at, unpadded(is_new[:, None], n[None, :], STATE, BLOCK_STATE), 0.0)
        place = (own * (GROUPS * GROUP_HEADS) + head).to(tl.int64)
        scale = tl.load(scales + place * NEW + line)
        weight_at = weights + place * (NEW * (BLOCK_CELL + NEW)) + line[:, None] * (BLOCK_CELL + NEW)
        of_tail = tl.load(weight_at + cell[None, :], kept[None, :], 0.0)
        of_new = tl.load(weight_at + BLOCK_CELL + line[None, :])

        outputs = tl.dot(queries, values.to(queries.dtype), input_precision=PRECISION) * scale[:, None]
        outputs = tl.dot(of_tail, earlier, outputs, input_precision=PRECISION)
        outputs = tl.dot(of_new, inputs, outputs, input_precision=PRECISION)
        if D is not None:
            outputs += tl.load(D + head) * inputs.to(tl.float32)
        y_at = y + token[:, None] * y_stride + column[None, :]
        tl.store(y_at, outputs.to(y.dtype.element_ty), is_new[:, None] & real[None, :])
        if at.offset + at.end - at.start >= CELL:
            piece = tl.load(first_piece + own)
            slot = tl.load(piece_slot + piece)
            if slot >= 0:
                close_short(
                    state, state_stride, slot, at, group, head, x, x_stride, B + group * STATE, B_stride,
                    tail_input, tail_B + at.tail * tail_B_stride + group * (RING * STATE), column, real,
                    totals, left, (head * pieces + piece).to(tl.int64) * CELL,
                    WIDTH, GROUP_HEADS, HEAD_DIM, STATE, BLOCK_STATE, CELL, BLOCK_CELL, RING, PRECISION,
                )  # fmt: skip
    elif ALONE:
        # Padding has finite outputs.
        for number in range(at.end - at.start):
            y_at = y + (at.first + number).to(tl.int64) * y_stride + column
            tl.store(y_at, tl.zeros([BLOCK], y.dtype.element_ty), real)


@triton.jit
def close_short(
    state, state_stride, slot, at, group, head, x, x_stride, B, B_stride, tail_input, tail_B, column, real,
    totals, left, step_at,
    WIDTH: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, BLOCK_CELL: tl.constexpr, RING: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state at the end of a row's first cell. It reads everything again: this happens once per cell."""
    cell = tl.arange(0, BLOCK_CELL)
    kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
    # Columns that only pad a cell have a time step of 0: any token stands in for them.
    source = (at.first - at.offset).to(tl.int64) + tl.minimum(tl.maximum(cell, at.offset), CELL - 1)
    new_at = x + source[:, None] * x_stride + column[None, :]
    inputs = load_opened(tail_input + ring[:, None] * HEAD_DIM + column[None, :], new_at, kept, real)
    remains = tl.load(left + step_at + cell, cell < CELL, 0.0)
    added = (inputs.to(tl.float32) * remains[:, None]).to(inputs.dtype)
    fading = tl.exp2(tl.load(totals + step_at + CELL - 1))
    key_at = tl.where(kept, tail_B + ring * STATE, B + source * B_stride)
    for low in range(0, BLOCK_STATE, min(CLOSED, BLOCK_STATE)):
        n = low + tl.arange(0, min(CLOSED, BLOCK_STATE))
        stored = unpadded(real[None, :], n[:, None], STATE, BLOCK_STATE)
        inside = (group * STATE + n[:, None]) * WIDTH + (head % GROUP_HEADS) * HEAD_DIM + column[None, :]
        keys = tl.load(key_at[None, :] + n[:, None], (n < STATE)[:, None], 0.0)
        values = load_state(state, state_stride, at, inside, stored, CELL) * fading
        values = tl.dot(keys, added, values, input_precision=PRECISION)
        capture(state, state_stride, slot, inside, values, stored)
