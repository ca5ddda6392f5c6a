"""The state space recurrence for rows of a few tokens that end inside their cell, such as drafts to be verified.

It follows `steps_kernel`, like `cells_kernel`, and computes only the lines of new tokens, and no state: a row that
reaches the end of its cell is left to `cells_kernel`.
"""

from __future__ import annotations

import triton.language as tl

from weft.kernels.cuda.arguments import STEP
from weft.kernels.cuda.closing import load_state
from weft.kernels.cuda.launching import jit
from weft.kernels.cuda.ssd_extend import load_opened
from weft.kernels.cuda.ssd_steps import unpadded
from weft.kernels.cuda.tails import is_short, open_cell, place_of

# Tokens of a short row: as many lines as the narrowest matmul has.
NEW = 16


@jit(**STEP)
def short_kernel(
    x, x_stride, B, B_stride, C, C_stride, D, y, y_stride, totals, shifted,
    state, state_stride, tail_input, tail_input_stride, tail_B, tail_B_stride, tail_decay, tail_decay_stride,
    tail_dt, tail_dt_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, CELL: tl.constexpr, RING: tl.constexpr, NEW: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns of a head, row of several tokens). A line is a new token; a column of a cell is any."""
    WIDTH: tl.constexpr = GROUP_HEADS * HEAD_DIM
    BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // BLOCKS
    group = head // GROUP_HEADS
    own = tl.program_id(1)
    at = place_of(own + decodes, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, CELL - 1, NEW):
        # The state takes longest, so it is loaded first.
        n, line = tl.arange(0, BLOCK_STATE), tl.arange(0, NEW)
        column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        real = column < HEAD_DIM
        stored = unpadded(real[None, :], n[:, None], STATE, BLOCK_STATE)
        inside = (group * STATE + n[:, None]) * WIDTH + (head % GROUP_HEADS) * HEAD_DIM + column[None, :]
        values = load_state(state, state_stride, at, inside, stored, CELL)

        length = at.end - at.start
        is_new = line < length
        token = (at.first + line).to(tl.int64)
        query_at = C + token[:, None] * C_stride + group * STATE + n[None, :]
        queries = tl.load(query_at, unpadded(is_new[:, None], n[None, :], STATE, BLOCK_STATE), 0.0)
        step_at = (head * pieces + tl.load(first_piece + own)).to(tl.int64) * CELL
        total = tl.load(totals + step_at + at.offset + line, is_new, 0.0)
        outputs = tl.dot(queries, values.to(queries.dtype), input_precision=PRECISION) * tl.exp2(total)[:, None]
        x += head * HEAD_DIM
        if D is not None:
            own_at = x + token[:, None] * x_stride + column[None, :]
            outputs += tl.load(D + head) * tl.load(own_at, is_new[:, None] & real[None, :], 0.0).to(tl.float32)

        packed = (at.first - at.offset).to(tl.int64)
        tail_B += at.tail * tail_B_stride + group * (RING * STATE)
        tail_input += at.tail * tail_input_stride + head * (RING * HEAD_DIM)
        for low in tl.range(0, at.offset + length, CHUNK, num_stages=STAGES):
            cell = low + tl.arange(0, CHUNK)
            kept, ring = open_cell(at.start, at.offset, cell, CELL, RING)
            # Beyond the row's end, its last token stands in: no line reads it there.
            source = packed + tl.minimum(tl.maximum(cell, at.offset), at.offset + length - 1)
            new_key_at = B + source[:, None] * B_stride + group * STATE + n[None, :]
            keys = load_opened(tail_B + ring[:, None] * STATE + n[None, :], new_key_at, kept, n < STATE)
            since = tl.load(shifted + step_at + cell, cell < CELL, 0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            seen = cell[None, :] <= at.offset + line[:, None]
            scores *= tl.exp2(tl.where(seen, total[:, None] - since[None, :], float("-inf")))
            new_at = x + source[:, None] * x_stride + column[None, :]
            inputs = load_opened(tail_input + ring[:, None] * HEAD_DIM + column[None, :], new_at, kept, real)
            outputs = tl.dot(scores.to(inputs.dtype), inputs, outputs, input_precision=PRECISION)
        y_at = y + token[:, None] * y_stride + head * HEAD_DIM + column[None, :]
        tl.store(y_at, outputs.to(y.dtype.element_ty), is_new[:, None] & real[None, :])
