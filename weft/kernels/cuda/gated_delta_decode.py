"""The gated delta rule for rows of one token: the checkpoint is read once, for the key and the query together.

A program first weighs its key head's tail, then sums its way through tiles of the states of that key's value heads,
always with some of them under way. Everything depends on the contents of tensors alone, so a recorded launch serves
any rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.gated_delta_cells import LANES, NORM_EPSILON, gates

# Of the rows of a small matrix product, two are used: the key's and the query's.
PAIR = tl.constexpr(16)
# How many rows of a state are closed at a time.
CLOSED = tl.constexpr(32)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def sums(a, b):
    """Both over their rows, in one go."""
    return tl.reduce((a, b), 0, add_both)


@triton.jit
def close_tile(
    before, after, has_state, tail_k, tail_u, decays, start, value,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state behind the token that fills a cell: all is in the tail by now. Once in a cell's tokens, so it may be
    read anew; what was kept in registers for it would slow down all others."""
    column = tl.arange(0, BLOCK)
    is_tail, ring = column < CELL, (start - (CELL - 1) + column) % RING
    real_value = value < VALUE_DIM
    total = tl.load(decays + (start % RING) * HEADS)
    since = tl.exp(tl.where(is_tail, total - tl.load(decays + ring * HEADS, is_tail, 0.0), float("-inf")))
    u_at = tail_u + ring[:, None] * (HEADS * VALUE_DIM) + value[None, :]
    corrected = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0)
    scaled = (corrected.to(tl.float32) * since[:, None]).to(corrected.dtype)
    for low in tl.range(0, KEYS, min(CLOSED, KEYS), num_stages=1):
        lane = low + tl.arange(0, min(CLOSED, KEYS))
        real_key = lane < KEY_DIM
        inside = lane[:, None] * VALUE_DIM + value[None, :]
        real = real_key[:, None] & real_value[None, :]
        memory = tl.load(before + inside, real & has_state, 0.0) * tl.exp(total)
        k_at = tail_k + lane[:, None] + ring[None, :] * (KEY_HEADS * KEY_DIM)
        keys = tl.load(k_at, real_key[:, None] & is_tail[None, :], 0.0)
        memory = tl.dot(keys, scaled, memory, input_precision=PRECISION)
        tl.store(after + inside, memory, real)


@triton.jit(do_not_specialize_on_alignment=LANES)
def decode_rows(
    q, k, token_stride, v, value_stride, step, strength, gate_stride, rates, bias, y,
    tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride, state, state_stride,
    row_start, row_slot, row_tail, row_closing,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SHARES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PROJECTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (part of the tiles, key head, row). SHARES is SHARED, or the next power of two."""
    key_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    HEADS: tl.constexpr = KEY_HEADS * SHARED
    BLOCKS: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    start, slot = tl.load(row_start + row), tl.load(row_slot + row).to(tl.int64)
    tail, closing = tl.load(row_tail + row).to(tl.int64), tl.load(row_closing + row).to(tl.int64)
    offset, has_state = start % CELL, start >= CELL
    column, lane, shared = tl.arange(0, BLOCK), tl.arange(0, KEYS), tl.arange(0, SHARES)
    real, is_head, heads = lane < KEY_DIM, shared < SHARED, key_head * SHARED + shared
    is_tail, ring = column < offset, (start - offset + column) % RING

    # What the key and the query get of each u in the tail, but for the decay since then.
    tail_k += tail * tail_k_stride + key_head * KEY_DIM
    keys_at = tail_k + ring[None, :] * (KEY_HEADS * KEY_DIM) + lane[:, None]
    keys = tl.load(keys_at, real[:, None] & is_tail[None, :], 0.0)
    source = row * token_stride + key_head * KEY_DIM + lane
    key, query = tl.load(k + source, real, 0.0).to(tl.float32), tl.load(q + source, real, 0.0).to(tl.float32)
    tail_decay += tail * tail_decay_stride
    before = tl.load(tail_decay + ((start - 1) % RING) * HEADS + heads, is_head & (offset > 0), 0.0)
    gate_at = row * gate_stride + heads
    raw_step, raw_strength = tl.load(step + gate_at, is_head, 0.0), tl.load(strength + gate_at, is_head, 0.0)
    g, beta = gates(raw_step, raw_strength, heads, is_head, rates, bias, PROJECTED)
    total = before + g
    key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPSILON)
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPSILON) * (KEY_DIM**-0.5)
    own = tl.sum(key * query, 0)
    # Rows 0 and 1 of a matrix: the key and the query.
    pair = tl.arange(0, PAIR)[:, None]
    both = tl.where(pair == 0, key[None, :], tl.where(pair == 1, query[None, :], 0.0)).to(keys.dtype)
    scores = tl.dot(both, keys, input_precision=PRECISION)
    key_scores, query_scores = sums(tl.where(pair == 0, scores, 0.0), tl.where(pair == 1, scores, 0.0))
    # Every part writes the same.
    new = start % RING
    tl.store(tail_k + new * (KEY_HEADS * KEY_DIM) + lane, key.to(tail_k.dtype.element_ty), real)
    tl.store(tail_decay + new * HEADS + heads, total, is_head)

    state += key_head * (SHARED * KEY_DIM * VALUE_DIM)
    checkpoint = state + slot * state_stride
    tail_u += tail * tail_u_stride + key_head * (SHARED * VALUE_DIM)
    v += row * value_stride + key_head * (SHARED * VALUE_DIM)
    y += row * (HEADS * VALUE_DIM) + key_head * (SHARED * VALUE_DIM)
    first = tl.program_id(0) * TILES
    for number in tl.range(0, TILES, num_stages=STAGES):
        head, value = (first + number) // BLOCKS, (first + number) % BLOCKS * VALUES + tl.arange(0, VALUES)
        real_value, at = value < VALUE_DIM, head * VALUE_DIM + value
        inside = head * (KEY_DIM * VALUE_DIM) + lane[:, None] * VALUE_DIM + value[None, :]
        memory = tl.load(checkpoint + inside, real[:, None] & real_value[None, :] & has_state, 0.0)
        u_at = tail_u + ring[:, None] * (HEADS * VALUE_DIM) + at[None, :]
        corrected = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0).to(tl.float32)
        totals = tl.load(tail_decay + ring * HEADS + key_head * SHARED + head, is_tail, 0.0)
        values = tl.load(v + at, real_value, 0.0).to(tl.float32)
        own_total = tl.sum(tl.where(shared == head, total, 0.0), 0)
        rate = tl.sum(tl.where(shared == head, beta, 0.0), 0)
        since = tl.exp(tl.where(is_tail, own_total - totals, float("-inf")))
        found, read = sums((key_scores * since)[:, None] * corrected, (query_scores * since)[:, None] * corrected)
        found_there, read_there = sums(memory * key[:, None], memory * query[:, None])
        opened = tl.exp(own_total)
        u = rate * (values - found - found_there * opened)
        tl.store(y + at, (read + read_there * opened + own * u).to(y.dtype.element_ty), real_value)
        tl.store(tail_u + new * (HEADS * VALUE_DIM) + at, u.to(tail_u.dtype.element_ty), real_value)
    if closing >= 0:
        # Others of its threads may have written what a thread reads now.
        tl.debug_barrier()
        for number in tl.range(0, TILES, num_stages=1):
            head, value = (first + number) // BLOCKS, (first + number) % BLOCKS * VALUES + tl.arange(0, VALUES)
            inside = head * (KEY_DIM * VALUE_DIM)
            close_tile(checkpoint + inside, state + closing * state_stride + inside, has_state, tail_k,
                       tail_u + head * VALUE_DIM, tail_decay + key_head * SHARED + head, start, value,
                       CELL, RING, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, BLOCK, KEYS, PRECISION)  # fmt: skip
