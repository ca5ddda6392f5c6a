"""The gated delta rule from cell to cell: a row's pieces in sequence, with a block of its state's columns in registers.

States go straight into their capture slots, outputs and tails to their places: nothing else is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.gated_delta.cells import NORM_EPSILON
from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.recurrent.closing import capture_halves, half, load_state, scales_of
from weft.kernels.cuda.recurrent.tails import columns_of, is_short, kept_from, place_of, whole_cells


@triton.jit
def keep_decays(
    totals, target, at, kept,
    CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the log decays of a row's positions from `kept` on in its tail. `totals` are those of its first piece."""
    for low in range(kept, at.end, BLOCK):
        position = low + tl.arange(0, BLOCK)
        piece = position // CELL - at.start // CELL
        total = tl.load(totals + piece * (HEADS * 5 * BLOCK) + position % CELL, position < at.end, 0.0)
        tl.store(target + position % RING, total, position < at.end)


@triton.jit
def keep_keys(
    source, token_stride, target, kept, end,
    RING: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store one head's normalised keys of a row's positions from `kept` on in its tail."""
    lane = tl.arange(0, KEYS)
    for low in range(kept, end, BLOCK):
        at = low + tl.arange(0, BLOCK)
        stays = (at < end)[:, None] & (lane < KEY_DIM)[None, :]
        keys = tl.load(source + at.to(tl.int64)[:, None] * token_stride + lane[None, :], stays, 0.0).to(tl.float32)
        keys *= tl.rsqrt(tl.sum(keys * keys, 1) + NORM_EPSILON)[:, None]
        tl.store(target + (at % RING)[:, None] * KEY_DIM + lane[None, :], keys.to(target.dtype.element_ty), stays)


@triton.jit
def pass_cell(
    memory, both, values, system, scale_at,
    CELL: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the state after a cell, the cell's u, and its outputs.

    Matmuls are few and wide: of 2 BLOCK rows the first half is for the cell's keys, the other for its queries.
    """
    double, column = tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK)
    for_key, first_half = double < BLOCK, (tl.arange(0, 2) == 0)[:, None, None]
    before_scale, after_scale = tl.load(scale_at + double), tl.load(scale_at + 2 * BLOCK + column)
    rate = tl.load(scale_at + 4 * BLOCK + column)
    last = tl.load(scale_at + 3 * BLOCK + CELL - 1)
    found = tl.dot(both, memory.to(both.dtype), input_precision=PRECISION) * before_scale[:, None]
    missing = values.to(tl.float32) * rate[:, None] - half(found, for_key, BLOCK, VALUES)
    solved = tl.dot(system, missing.to(both.dtype), input_precision=PRECISION)
    u = half(solved, for_key, BLOCK, VALUES)
    read = half(found + solved, double >= BLOCK, BLOCK, VALUES)
    # Queries add nothing to the state.
    added = tl.reshape(tl.where(first_half, (u * after_scale[:, None])[None], 0.0), (2 * BLOCK, VALUES))
    memory = tl.dot(tl.trans(both), added.to(both.dtype), memory * tl.exp(last), input_precision=PRECISION)
    return memory, u, read


@triton.jit
def pass_part(
    memory, at, position, kept, k, q_offset, token_stride, head_at, v, value_stride, y, tail_u, system_at,
    scale_at, value, CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass a cell that the row covers only in part. k, v and y point to where position 0 would be.

    Keys before the row's start were copied from its tail. Their u are known: their equations are u = u, with the
    tail's u in place of v and without `found`.
    """
    double, column, lane = tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK), tl.arange(0, KEYS)
    for_key, real_value = double < BLOCK, value < VALUE_DIM
    tokens = columns_of(at, position, double % BLOCK, CELL, RING)
    is_tail = tokens.is_tail & for_key
    source = k + tokens.position.to(tl.int64) * token_stride + tl.where(for_key, 0, q_offset)
    both_at = tl.where(is_tail, head_at + double * KEY_DIM, source)
    real = (is_tail | tokens.is_new)[:, None] & (lane < KEY_DIM)[None, :]
    both = tl.load(both_at[:, None] + lane[None, :], real, 0.0)
    tokens = columns_of(at, position, column, CELL, RING)
    tail_at = tail_u + tokens.ring * VALUE_DIM
    value_at = tl.where(tokens.is_tail, tail_at, v + tokens.position.to(tl.int64) * value_stride)
    real = (tokens.is_tail | tokens.is_new)[:, None] & real_value[None, :]
    values = tl.load(value_at[:, None] + value[None, :], real, 0.0)
    system = tl.load(system_at + double[:, None] * BLOCK + column[None, :])
    memory, u, read = pass_cell(memory, both, values, system, scale_at, CELL, BLOCK, VALUES, PRECISION)
    y_at = y + tokens.position.to(tl.int64) * (HEADS * VALUE_DIM)
    is_output = tokens.is_new[:, None] & real_value[None, :]
    tl.store(y_at[:, None] + value[None, :], read.to(y.dtype.element_ty), is_output)
    stays = is_output & (tokens.position >= kept)[:, None]
    tl.store(tail_at[:, None] + value[None, :], u.to(tail_u.dtype.element_ty), stays)
    return memory


@triton.jit
def pass_whole(
    memory, position, kept, k, q_offset, token_stride, v, value_stride, y, tail_u, system_at,
    scale_at, value, CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass a cell full of new tokens: no masks, and little to compute but matmuls."""
    double, column, lane = tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK), tl.arange(0, KEYS)
    offsets = (double % BLOCK) * token_stride + tl.where(double < BLOCK, 0, q_offset)
    k += position.to(tl.int64) * token_stride
    v += position.to(tl.int64) * value_stride
    y += position.to(tl.int64) * (HEADS * VALUE_DIM)
    value_offsets = column[:, None] * value_stride + value[None, :]
    y_offsets = column[:, None] * (HEADS * VALUE_DIM) + value[None, :]
    if CELL == BLOCK and KEYS == KEY_DIM and VALUE_DIM % VALUES == 0:
        real = None
        both, values = tl.load(k + offsets[:, None] + lane[None, :]), tl.load(v + value_offsets)
    else:
        real = (column < CELL)[:, None] & (value < VALUE_DIM)[None, :]
        real_both = (double % BLOCK < CELL)[:, None] & (lane < KEY_DIM)[None, :]
        both = tl.load(k + offsets[:, None] + lane[None, :], real_both, 0.0)
        values = tl.load(v + value_offsets, real, 0.0)
    system = tl.load(system_at + double[:, None] * BLOCK + column[None, :])
    memory, u, read = pass_cell(memory, both, values, system, scale_at, CELL, BLOCK, VALUES, PRECISION)
    tl.store(y + y_offsets, read.to(y.dtype.element_ty), real)
    if RING > CELL and position + CELL > kept:
        at = position + column
        tail_at = tail_u + (at % RING)[:, None] * VALUE_DIM + value[None, :]
        stays = ((at >= kept) & (column < CELL))[:, None] & (value < VALUE_DIM)[None, :]
        tl.store(tail_at, u.to(tail_u.dtype.element_ty), stays)
    return memory


@jit(**STEP)
def walk_cells(
    k, q_offset, token_stride, v, value_stride, y, systems, scales, head_keys,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROOM: tl.constexpr, NEW: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, value head, row of several tokens). Queries lie `q_offset` after their keys.

    Rows of up to NEW tokens are those of `gated_delta_short`.
    """
    head, long_row = tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * SHARED
    key_head = head // SHARED
    at = place_of(decodes + long_row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, ROOM, NEW):
        return
    begin, stop = tl.load(first_piece + long_row), tl.load(first_piece + long_row + 1)
    kept = kept_from(at, CELL, RING)

    lane, value = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    state += head * (KEY_DIM * VALUE_DIM)
    inside = lane[:, None] * VALUE_DIM + value[None, :]
    real_state = (lane < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :]
    scales_at = scales_of(state_scales, head, 0, value, value < VALUE_DIM, KEYS, KEY_DIM, VALUE_DIM)
    memory = load_state(state, state_stride, at, inside, real_state, CELL, scales_at)

    # Pointers to where the row's position 0 would be, to its tail and to its copied keys.
    zero = (at.first - at.start).to(tl.int64)
    k += zero * token_stride + key_head * KEY_DIM
    v += zero * value_stride + head * VALUE_DIM
    y += (zero * HEADS + head) * VALUE_DIM
    tail_u += at.tail * tail_u_stride + head * (RING * VALUE_DIM)
    head_at = head_keys + (long_row * KEY_HEADS + key_head) * (BLOCK * KEY_DIM)
    # Strides from one piece to the next.
    SYSTEM: tl.constexpr = HEADS * 2 * BLOCK * BLOCK
    SCALES: tl.constexpr = HEADS * 5 * BLOCK
    systems += begin.to(tl.int64) * SYSTEM + head * (2 * BLOCK * BLOCK)
    scales += begin.to(tl.int64) * SCALES + head * (5 * BLOCK)
    opening = at.start - at.offset
    whole, rest = whole_cells(at, begin, stop, CELL)
    for piece in tl.range(begin, whole, num_stages=STAGES):
        memory = pass_part(
            memory, at, opening, kept, k, q_offset, token_stride, head_at, v, value_stride, y, tail_u,
            systems + (piece - begin) * SYSTEM, scales + (piece - begin) * SCALES, value,
            CELL, RING, HEADS, KEY_DIM, VALUE_DIM, BLOCK, KEYS, VALUES, PRECISION,
        )  # fmt: skip
        memory = capture_halves(
            state, state_stride, tl.load(piece_slot + piece), memory, value, KEY_DIM, VALUE_DIM, scales_at
        )  # fmt: skip
    for piece in tl.range(whole, rest, num_stages=STAGES):
        memory = pass_whole(
            memory, opening + (piece - begin) * CELL, kept, k, q_offset, token_stride, v, value_stride, y, tail_u,
            systems + (piece - begin) * SYSTEM, scales + (piece - begin) * SCALES, value,
            CELL, RING, HEADS, KEY_DIM, VALUE_DIM, BLOCK, KEYS, VALUES, PRECISION,
        )  # fmt: skip
        memory = capture_halves(
            state, state_stride, tl.load(piece_slot + piece), memory, value, KEY_DIM, VALUE_DIM, scales_at
        )  # fmt: skip
    for piece in tl.range(rest, stop, num_stages=STAGES):
        memory = pass_part(
            memory, at, opening + (piece - begin) * CELL, kept, k, q_offset, token_stride, head_at,
            v, value_stride, y, tail_u, systems + (piece - begin) * SYSTEM, scales + (piece - begin) * SCALES, value,
            CELL, RING, HEADS, KEY_DIM, VALUE_DIM, BLOCK, KEYS, VALUES, PRECISION,
        )  # fmt: skip

    if tl.program_id(0) == 0:
        decays = tail_decay + at.tail * tail_decay_stride + head * RING
        keep_decays(scales + 3 * BLOCK, decays, at, kept, CELL, RING, HEADS, BLOCK)
        if head % SHARED == 0:
            tail_k += at.tail * tail_k_stride + key_head * (RING * KEY_DIM)
            keep_keys(k, token_stride, tail_k, kept, at.end, RING, KEY_DIM, BLOCK, KEYS)
