"""The gated delta rule for rows of one token: the checkpoint is read once, for the key and the query together.

There are two kernels. The first computes small values and those that value heads share, by row and key head. The
second then only reads states and sums. Everything depends on the contents of tensors alone, so a recorded launch
serves any rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.gated_delta.cells import NORM_EPSILON, gates
from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.launch.overlap import wait
from weft.kernels.cuda.recurrent.closing import capture, load_state, scales_of
from weft.kernels.cuda.recurrent.tails import decay_before, open_cell, place_of

# Rows of a state that are closed at a time.
CLOSED = tl.constexpr(32)


@jit(**STEP)
def weigh_tails(
    q, k, token_stride, step, strength, gate_stride, rates, bias, lookups, weights, factors,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, PROJECTED: tl.constexpr,
    MOST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (key head, row). Append key and decay to the tail, and write

    lookups[row, key head]  the key and the query, normalised
    weights[row, head]      weights of each u in the tail for the key and the query; undefined beyond it
    factors[row, head]      decay of the checkpoint, rate of correction, weight of the new u for the query
    """
    key_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = KEY_HEADS * SHARED
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    column, lane, shared = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, HEADS)
    real, is_head, head = lane < KEY_DIM, shared < SHARED, key_head * SHARED + shared
    # Load what is older than the step while the previous kernel ends.
    tail_k += at.tail * tail_k_stride + key_head * (RING * KEY_DIM)
    decays = tail_decay + at.tail * tail_decay_stride + head * RING
    keys, totals = load_keys(tail_k, decays, at, column, lane, real, is_head, CELL, RING, KEY_DIM)
    before = decay_before(decays, at, is_head, RING)
    wait(EARLY)
    # Issue all loads before anything waits for them.
    source = row * token_stride + key_head * KEY_DIM + lane
    key, query = tl.load(k + source, real, 0.0).to(tl.float32), tl.load(q + source, real, 0.0).to(tl.float32)
    gate_at = row * gate_stride + head
    raw_step, raw_strength = tl.load(step + gate_at, is_head, 0.0), tl.load(strength + gate_at, is_head, 0.0)
    g, beta = gates(raw_step, raw_strength, head, is_head, rates, bias, PROJECTED, MOST)

    key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPSILON)
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPSILON) * (KEY_DIM**-0.5)
    lookup_at = lookups + (row * KEY_HEADS + key_head) * (2 * KEYS) + lane
    tl.store(lookup_at, key)
    tl.store(lookup_at + KEYS, query)
    total = before + g
    factor_at = factors + (row * heads + head) * 4
    tl.store(factor_at, tl.exp(total), is_head)
    tl.store(factor_at + 1, beta, is_head)
    tl.store(factor_at + 2, tl.sum(key * query, 0), is_head)
    weights_at = weights + (row * heads + head)[:, None] * (2 * BLOCK)
    for _ in tl.range(0, at.offset, CHUNK, num_stages=1):
        later = column + CHUNK
        next_keys, next_totals = keys, totals
        if CHUNK < BLOCK:
            # Load the next keys while some are weighed.
            next_keys, next_totals = load_keys(tail_k, decays, at, later, lane, real, is_head, CELL, RING, KEY_DIM)
        keys = keys.to(tl.float32)
        of_key, of_query = tl.reduce((keys * key[None, :], keys * query[None, :]), 1, add_both)
        since = tl.exp(total[:, None] - totals)
        tl.store(weights_at + column[None, :], of_key[None, :] * since, is_head[:, None])
        tl.store(weights_at + BLOCK + column[None, :], of_query[None, :] * since, is_head[:, None])
        keys, totals, column = next_keys, next_totals, later
    tl.store(tail_k + (at.start % RING) * KEY_DIM + lane, key.to(tail_k.dtype.element_ty), real)
    tl.store(decays + at.start % RING, total, is_head)


@triton.jit
def load_keys(
    tail_k, decays, at, column, lane, real, is_head,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_DIM: tl.constexpr,
):  # fmt: skip
    """Load keys of some columns of an open cell, and the decays up to them by head. Read nothing beyond the tail."""
    is_tail, ring = open_cell(at.start, at.offset, column, CELL, RING)
    key_at = tail_k + ring[:, None] * KEY_DIM + lane[None, :]
    keys = tl.load(key_at, is_tail[:, None] & real[None, :], 0.0)
    return keys, tl.load(decays[:, None] + ring[None, :], is_head[:, None] & is_tail[None, :], 0.0)


@triton.jit
def close_cell(
    state, state_stride, state_scales, head, at, lookups, u, opened, tail_k, tail_u, decays,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state after the token that fills a cell. Others continue from it, so operands are wider than elsewhere.

    It reads everything again: this happens once per cell, and keeping the values in registers would slow down all
    other tokens.
    """
    column = tl.arange(0, BLOCK)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_tail, ring = open_cell(at.start, CELL - 1, column, CELL, RING)
    real_value = value < VALUE_DIM
    total = tl.load(decays + at.start % RING)
    since = tl.exp(tl.where(is_tail, total - tl.load(decays + ring, is_tail, 0.0), float("-inf")))
    u_at = tail_u + ring[:, None] * VALUE_DIM + value[None, :]
    corrected = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0)
    scaled = corrected.to(tl.float32) * since[:, None]
    for low in range(0, KEYS, min(CLOSED, KEYS)):
        lane = low + tl.arange(0, min(CLOSED, KEYS))
        real_key = lane < KEY_DIM
        inside = lane[:, None] * VALUE_DIM + value[None, :]
        real = real_key[:, None] & real_value[None, :]
        scales = scales_of(
            state_scales, head, low, value, real_value, min(CLOSED, KEYS), KEY_DIM, VALUE_DIM
        )  # fmt: skip
        memory = load_state(state, state_stride, at, inside, real, CELL, scales) * opened
        k_at = tail_k + lane[:, None] + ring[None, :] * KEY_DIM
        keys = tl.load(k_at, real_key[:, None] & is_tail[None, :], 0.0)
        memory += tl.load(lookups + lane)[:, None] * u[None, :]
        memory = tl.dot(keys.to(tl.float32), scaled, memory, input_precision=PRECISION)
        capture(state, state_stride, at.closing, inside, memory, real, scales)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def sums(a, b):
    """Sum both over their rows in one reduction."""
    return tl.reduce((a, b), 0, add_both)


@jit(**STEP)
def decode_rows(
    v, value_stride, y, lookups, weights, factors,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, value head, row)."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, heads = head // SHARED, KEY_HEADS * SHARED
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    lane = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    real_value = value < VALUE_DIM
    # Loading the state takes longest, so it is issued first.
    state += head * (KEY_DIM * VALUE_DIM)
    inside = lane[:, None] * VALUE_DIM + value[None, :]
    real_state = (lane < KEY_DIM)[:, None] & real_value[None, :]
    scales = scales_of(state_scales, head, 0, value, real_value, KEYS, KEY_DIM, VALUE_DIM)
    memory = load_state(state, state_stride, at, inside, real_state, CELL, scales)

    tail_u += at.tail * tail_u_stride + head * (RING * VALUE_DIM)
    column = tl.arange(0, BLOCK)
    is_tail, ring = open_cell(at.start, at.offset, column, CELL, RING)
    u_at = tail_u + ring[:, None] * VALUE_DIM + value[None, :]
    corrected = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0)

    # Then issue all loads of this step, before anything waits for them.
    wait(EARLY)
    values = tl.load(v + row * value_stride + head * VALUE_DIM + value, real_value, 0.0).to(tl.float32)
    lookups += (row * KEY_HEADS + key_head) * (2 * KEYS)
    factors += (row * heads + head) * 4
    weights += (row * heads + head) * (2 * BLOCK) + column
    key, query = tl.load(lookups + lane), tl.load(lookups + KEYS + lane)
    key_weights, query_weights = tl.load(weights, is_tail, 0.0), tl.load(weights + BLOCK, is_tail, 0.0)
    opened, beta, own = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)

    corrected = corrected.to(tl.float32)
    found, read = sums(key_weights[:, None] * corrected, query_weights[:, None] * corrected)
    from_state, read_state = sums(memory * key[:, None], memory * query[:, None])
    found, read = found + from_state * opened, read + read_state * opened
    u = beta * (values - found)
    y_at = y + (row * heads + head) * VALUE_DIM + value
    tl.store(y_at, (read + own * u).to(y.dtype.element_ty), real_value)
    tl.store(tail_u + (at.start % RING) * VALUE_DIM + value, u.to(tail_u.dtype.element_ty), real_value)
    if at.closing >= 0:
        close_cell(
            state, state_stride, state_scales, head, at, lookups, u, opened,
            tail_k + at.tail * tail_k_stride + key_head * (RING * KEY_DIM), tail_u,
            tail_decay + at.tail * tail_decay_stride + head * RING,
            CELL, RING, KEY_DIM, VALUE_DIM, BLOCK, KEYS, VALUES, PRECISION,
        )  # fmt: skip
