"""The gated delta rule from cell to cell: a row's pieces in sequence, with a block of its state's columns in registers.

States go straight into the slots that were asked for, outputs and tails to where they belong: nothing else is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.gated_delta_cells import LANES, NORM_EPSILON


@triton.jit
def keep_decays(
    scales, target, kept, start, end, begin, head, heads, CELL: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr
):
    """The log decays of a row's positions from `kept` on, into its tail. `begin` is the row's first piece."""
    for low in range(kept, end, BLOCK):
        at = low + tl.arange(0, BLOCK)
        own = ((begin + at // CELL - start // CELL) * heads + head).to(tl.int64)
        total = tl.load(scales + own * (4 * BLOCK) + 3 * BLOCK + at % CELL, at < end, 0.0)
        tl.store(target + (at % RING) * heads + head, total, at < end)


@triton.jit
def keep_keys(
    source, token_stride, target, kept, end,
    RING: tl.constexpr, TAIL_STRIDE: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One head's keys of a row's positions from `kept` on, normalised, into its tail."""
    lane = tl.arange(0, KEYS)
    for low in range(kept, end, BLOCK):
        at = low + tl.arange(0, BLOCK)
        stays = (at < end)[:, None] & (lane < KEY_DIM)[None, :]
        keys = tl.load(source + at.to(tl.int64)[:, None] * token_stride + lane[None, :], stays, 0.0).to(tl.float32)
        keys *= tl.rsqrt(tl.sum(keys * keys, 1) + NORM_EPSILON)[:, None]
        tl.store(target + (at % RING)[:, None] * TAIL_STRIDE + lane[None, :], keys.to(target.dtype.element_ty), stays)


@triton.jit
def half(x, wanted, ROWS: tl.constexpr, VALUES: tl.constexpr):
    """The wanted half of 2 ROWS rows. Of a product's rows, both halves lie in the same threads."""
    return tl.sum(tl.reshape(tl.where(wanted[:, None], x, 0.0), (2, ROWS, VALUES)), 0)


@triton.jit
def write_state(
    target, memory, value,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A captured state into its slot, by halves: rows are reordered in shared memory, and two programs are to fit."""
    lane = tl.arange(0, KEYS // 2)
    for part in tl.static_range(2):
        row = part * (KEYS // 2) + lane
        rows = half(memory, (tl.arange(0, KEYS) >= KEYS // 2) == (part == 1), KEYS // 2, VALUES)
        real = (row < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :]
        tl.store(target + row[:, None] * VALUE_DIM + value[None, :], rows, real)


@triton.jit(do_not_specialize=["decodes"], do_not_specialize_on_alignment=LANES)
def walk_cells(
    q, k, token_stride, v, value_stride, y, systems, scales, head_keys,
    tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride, state, state_stride,
    row_start, row_first, row_slot, row_tail, first_piece, piece_slot, decodes,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, value head, row of several tokens)."""
    head, long_row = tl.program_id(1), tl.program_id(2)
    row = decodes + long_row
    key_head, heads = head // SHARED, KEY_HEADS * SHARED
    start, first = tl.load(row_start + row), tl.load(row_first + row)
    end = start + tl.load(row_first + row + 1) - first
    tail = tl.load(row_tail + row).to(tl.int64)
    begin, stop = tl.load(first_piece + long_row), tl.load(first_piece + long_row + 1)
    # A later row may start up to RING - CELL tokens before this one's end, and reads its cell from the beginning.
    earliest = tl.maximum(end - (RING - CELL), 0)
    kept = tl.maximum(start, earliest - earliest % CELL)

    lane, value = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    real_key, real_value = lane < KEY_DIM, value < VALUE_DIM
    inside = head.to(tl.int64) * KEY_DIM * VALUE_DIM + lane[:, None] * VALUE_DIM + value[None, :]
    real_state = real_key[:, None] & real_value[None, :]
    slot = tl.load(row_slot + row).to(tl.int64)
    memory = tl.load(state + slot * state_stride + inside, real_state & (start >= CELL), 0.0)

    first_half = (tl.arange(0, 2) == 0)[:, None, None]
    # Products are few and wide: rows below BLOCK are for the cell's keys, the others for its queries.
    double = tl.arange(0, 2 * BLOCK)
    for_key, column = double < BLOCK, tl.arange(0, BLOCK)
    matrix = double[:, None] * BLOCK + column[None, :]
    head_at = head_keys + ((long_row * KEY_HEADS + key_head) * BLOCK + double) * KEY_DIM
    for piece in tl.range(begin, stop, num_stages=STAGES):
        position = start - start % CELL + (piece - begin) * CELL
        # Keys of a tail are in `head_keys`; there are no queries of it.
        at = position + double % BLOCK
        is_tail, is_new = (at < start) & for_key, (at >= start) & (at < end) & (double % BLOCK < CELL)
        source = (first + at - start).to(tl.int64) * token_stride + key_head * KEY_DIM
        both_at = tl.where(is_tail, head_at, tl.where(for_key, k + source, q + source))
        both = tl.load(both_at[:, None] + lane[None, :], (is_tail | is_new)[:, None] & real_key[None, :], 0.0)
        own = (piece * heads + head).to(tl.int64)
        system = tl.load(systems + own * (2 * BLOCK * BLOCK) + matrix)
        scale_at = scales + own * (4 * BLOCK)
        before_scale, after_scale = tl.load(scale_at + double), tl.load(scale_at + 2 * BLOCK + column)
        last = tl.load(scale_at + 3 * BLOCK + CELL - 1)
        at = position + column
        is_tail, is_new = at < start, (at >= start) & (at < end) & (column < CELL)
        # What is sought on a tail's columns is known: their equations are u = u, and the scale of `found` is 0.
        token = (first + at - start).to(tl.int64)
        tail_at = tail_u + tail * tail_u_stride + ((at % RING) * heads + head) * VALUE_DIM
        value_at = tl.where(is_tail, tail_at, v + token * value_stride + head * VALUE_DIM)
        values = tl.load(value_at[:, None] + value[None, :], (is_tail | is_new)[:, None] & real_value[None, :], 0.0)

        found = tl.dot(both, memory.to(both.dtype), input_precision=PRECISION) * before_scale[:, None]
        missing = values.to(tl.float32) - half(found, for_key, BLOCK, VALUES)
        solved = tl.dot(system, missing.to(both.dtype), input_precision=PRECISION)
        # Queries bring nothing into the state.
        u = half(solved, for_key, BLOCK, VALUES)
        read = half(found + solved, double >= BLOCK, BLOCK, VALUES)
        added = tl.reshape(tl.where(first_half, (u * after_scale[:, None])[None], 0.0), (2 * BLOCK, VALUES))
        memory = tl.dot(tl.trans(both), added.to(both.dtype), memory * tl.exp(last), input_precision=PRECISION)

        y_at = y + (token * heads + head) * VALUE_DIM
        is_output = is_new[:, None] & real_value[None, :]
        tl.store(y_at[:, None] + value[None, :], read.to(y.dtype.element_ty), is_output)
        target = tl.load(piece_slot + piece)
        if target >= 0:
            write_state(state + target.to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM), memory, value,
                        KEY_DIM, VALUE_DIM, KEYS, VALUES)  # fmt: skip
        if position + CELL > kept:
            stays = is_output & (at >= kept)[:, None]
            tl.store(tail_at[:, None] + value[None, :], u.to(tail_u.dtype.element_ty), stays)

    if tl.program_id(0) == 0:
        keep_decays(
            scales, tail_decay + tail * tail_decay_stride, kept, start, end, begin, head, heads, CELL, RING, BLOCK
        )
        if head % SHARED == 0:
            source = k + (first - start).to(tl.int64) * token_stride + key_head * KEY_DIM
            target = tail_k + tail * tail_k_stride + key_head * KEY_DIM
            keep_keys(source, token_stride, target, kept, end, RING, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK, KEYS)
