"""The delta rule with decays by channel for rows of one token, in two kernels as in `gated_delta/decode.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.gated_delta.cells import NORM_EPSILON, softplus
from weft.kernels.cuda.gated_delta.decode import CLOSED, add_both, sums
from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.launch.overlap import wait
from weft.kernels.cuda.recurrent.closing import capture, load_state, scales_of
from weft.kernels.cuda.recurrent.tails import decay_before, open_cell, place_of


@triton.jit
def channel_gates(step, strength, head, lane, real, rates, bias, KEY_DIM: tl.constexpr):
    """Return the log decays and write strengths of a head's tokens, from projections or as given."""
    step, strength = step.to(tl.float32), strength.to(tl.float32)
    if rates is not None:
        step = softplus(step + tl.load(bias + head * KEY_DIM + lane, real, 0.0)) * tl.load(rates + head)
        strength = tl.sigmoid(strength)
    return step, strength


@jit(**STEP)
def weigh_channels(
    q, k, token_stride, step, step_stride, strength, strength_stride, rates, bias, lookups, weights, factors,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (head, row). Append key and decays to the tail, and write

    lookups[row, head]  the key and the query, normalised and decayed since the cell's start; the key alone
    weights[row, head]  weights of each u in the tail for the key and the query; undefined beyond it
    factors[row, head]  rate of correction, weight of the new u for the query
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    column, lane = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    real = lane < KEY_DIM
    tail_k += at.tail * tail_k_stride + head * (RING * KEY_DIM)
    decays = tail_decay + at.tail * tail_decay_stride + head * (RING * KEY_DIM)
    before = decay_before(decays + lane, at, real, RING, KEY_DIM)
    wait(EARLY)
    source = row * token_stride + head * KEY_DIM + lane
    key, query = tl.load(k + source, real, 0.0).to(tl.float32), tl.load(q + source, real, 0.0).to(tl.float32)
    raw_step = tl.load(step + row * step_stride + head * KEY_DIM + lane, real, 0.0)
    raw_strength = tl.load(strength + row * strength_stride + head)
    g, beta = channel_gates(raw_step, raw_strength, head, lane, real, rates, bias, KEY_DIM)

    key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPSILON)
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPSILON) * (KEY_DIM**-0.5)
    total = before + g
    own = row * HEADS + head
    lookup_at = lookups + own * (3 * KEYS) + lane
    tl.store(lookup_at, key * tl.exp(total))
    tl.store(lookup_at + KEYS, query * tl.exp(total))
    tl.store(lookup_at + 2 * KEYS, key)
    tl.store(factors + own * 2, beta)
    tl.store(factors + own * 2 + 1, tl.sum(key * query, 0))
    weights += own * (2 * BLOCK)
    for low in tl.range(0, at.offset, CHUNK):
        is_tail, ring = open_cell(at.start, at.offset, low + column, CELL, RING)
        inside, known = ring[:, None] * KEY_DIM + lane[None, :], is_tail[:, None] & real[None, :]
        since = tl.exp(total[None, :] - tl.load(decays + inside, known, 0.0))
        keys = tl.load(tail_k + inside, known, 0.0).to(tl.float32) * since
        of_key, of_query = tl.reduce((keys * key[None, :], keys * query[None, :]), 1, add_both)
        tl.store(weights + low + column, of_key)
        tl.store(weights + BLOCK + low + column, of_query)
    tl.store(tail_k + (at.start % RING) * KEY_DIM + lane, key.to(tail_k.dtype.element_ty), real)
    tl.store(decays + (at.start % RING) * KEY_DIM + lane, total, real)


@jit(**STEP)
def decode_channels(
    v, value_stride, y, lookups, weights, factors,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, head, row)."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    lane, column = tl.arange(0, KEYS), tl.arange(0, BLOCK)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    real_value = value < VALUE_DIM
    # Load what is older than the step while the previous kernel ends.
    state += head * (KEY_DIM * VALUE_DIM)
    real_state = (lane < KEY_DIM)[:, None] & real_value[None, :]
    inside = lane[:, None] * VALUE_DIM + value[None, :]
    scales = scales_of(state_scales, head, 0, value, real_value, KEYS, KEY_DIM, VALUE_DIM)
    memory = load_state(state, state_stride, at, inside, real_state, CELL, scales)
    tail_u += at.tail * tail_u_stride + head * (RING * VALUE_DIM)
    is_tail, ring = open_cell(at.start, at.offset, column, CELL, RING)
    u_at = tail_u + ring[:, None] * VALUE_DIM + value[None, :]
    corrected = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0)

    wait(EARLY)
    own = row * HEADS + head
    values = tl.load(v + row * value_stride + head * VALUE_DIM + value, real_value, 0.0).to(tl.float32)
    lookups += own * (3 * KEYS)
    weights += own * (2 * BLOCK) + column
    key, query = tl.load(lookups + lane), tl.load(lookups + KEYS + lane)
    key_weights, query_weights = tl.load(weights, is_tail, 0.0), tl.load(weights + BLOCK, is_tail, 0.0)
    beta, new_weight = tl.load(factors + own * 2), tl.load(factors + own * 2 + 1)

    corrected = corrected.to(tl.float32)
    found, read = sums(key_weights[:, None] * corrected, query_weights[:, None] * corrected)
    from_state, read_state = sums(memory * key[:, None], memory * query[:, None])
    u = beta * (values - (found + from_state))
    tl.store(y + own * VALUE_DIM + value, (read + read_state + new_weight * u).to(y.dtype.element_ty), real_value)
    tl.store(tail_u + (at.start % RING) * VALUE_DIM + value, u.to(tail_u.dtype.element_ty), real_value)
    if at.closing >= 0:
        close_channels(
            state, state_stride, state_scales, head, at, lookups + 2 * KEYS, u, tail_u, value,
            tail_k + at.tail * tail_k_stride + head * (RING * KEY_DIM),
            tail_decay + at.tail * tail_decay_stride + head * (RING * KEY_DIM),
            CELL, RING, KEY_DIM, VALUE_DIM, BLOCK, KEYS, PRECISION,
        )  # fmt: skip


@triton.jit
def close_channels(
    state, state_stride, state_scales, head, at, new_key, u, tail_u, value, tail_k, decays,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state after the token that fills a cell, some lines at a time. Read all again, as `close_cell` does."""
    is_tail, ring = open_cell(at.start, CELL - 1, tl.arange(0, BLOCK), CELL, RING)
    u_at = tail_u + ring[:, None] * VALUE_DIM + value[None, :]
    corrected = tl.load(u_at, is_tail[:, None] & (value < VALUE_DIM)[None, :], 0.0).to(tl.float32)
    for low in range(0, KEYS, min(CLOSED, KEYS)):
        lane = low + tl.arange(0, min(CLOSED, KEYS))
        real_key = lane < KEY_DIM
        inside, real = lane[:, None] * VALUE_DIM + value[None, :], real_key[:, None] & (value < VALUE_DIM)[None, :]
        token_at, known = lane[:, None] + ring[None, :] * KEY_DIM, real_key[:, None] & is_tail[None, :]
        total = tl.load(decays + (at.start % RING) * KEY_DIM + lane, real_key, 0.0)
        since = tl.exp(total[:, None] - tl.load(decays + token_at, known, 0.0))
        keys = tl.load(tail_k + token_at, known, 0.0).to(tl.float32) * since
        scales = scales_of(
            state_scales, head, low, value, value < VALUE_DIM, min(CLOSED, KEYS), KEY_DIM, VALUE_DIM
        )  # fmt: skip
        memory = load_state(state, state_stride, at, inside, real, CELL, scales) * tl.exp(total)[:, None]
        memory += tl.load(new_key + lane)[:, None] * u[None, :]
        memory = tl.dot(keys, corrected, memory, input_precision=PRECISION)
        capture(state, state_stride, at.closing, inside, memory, real, scales)
