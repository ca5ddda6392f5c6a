"""The gated delta rule for rows of one token: the checkpoint is read once, for the key and the query together.

Everything depends on the contents of tensors alone, so a recorded launch serves any rows.
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
def close_cell(
    before, after, has_state, key, key_scale, u, opened, total, tail_k, tail_u, decays, cell_start, offset,
    RING: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state behind the token that fills a cell. Reads everything anew: that happens once in a cell's tokens, and
    what was kept in registers for it would slow down all others."""
    column = tl.arange(0, BLOCK)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_tail, ring = column < offset, (cell_start + column) % RING
    real_value = value < VALUE_DIM
    since = tl.exp(tl.where(is_tail, total - tl.load(decays + ring * HEADS, is_tail, 0.0), float("-inf")))
    u_at = tail_u + ring[:, None] * (HEADS * VALUE_DIM) + value[None, :]
    corrected = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0)
    scaled = (corrected.to(tl.float32) * since[:, None]).to(corrected.dtype)
    for low in range(0, KEYS, min(CLOSED, KEYS)):
        lane = low + tl.arange(0, min(CLOSED, KEYS))
        real_key = lane < KEY_DIM
        inside = lane[:, None] * VALUE_DIM + value[None, :]
        real = real_key[:, None] & real_value[None, :]
        memory = tl.load(before + inside, real & has_state, 0.0) * opened
        new_key = tl.load(key + lane, real_key, 0.0).to(tl.float32) * key_scale
        k_at = tail_k + lane[:, None] + ring[None, :] * (KEY_HEADS * KEY_DIM)
        keys = tl.load(k_at, real_key[:, None] & is_tail[None, :], 0.0)
        memory = tl.dot(keys, scaled, memory + new_key[:, None] * u[None, :], input_precision=PRECISION)
        tl.store(after + inside, memory, real)


@triton.jit(do_not_specialize_on_alignment=LANES)
def decode_rows(
    q, k, token_stride, v, value_stride, step, strength, gate_stride, rates, bias, y,
    tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride, state, state_stride,
    row_start, row_slot, row_tail, row_closing,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, PROJECTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, value head, row)."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, heads = head // SHARED, KEY_HEADS * SHARED
    start, slot = tl.load(row_start + row), tl.load(row_slot + row).to(tl.int64)
    tail, closing = tl.load(row_tail + row).to(tl.int64), tl.load(row_closing + row).to(tl.int64)
    lane = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    real_key, real_value = lane < KEY_DIM, value < VALUE_DIM
    # The state is what takes long: it is asked for first.
    state += head * (KEY_DIM * VALUE_DIM)
    before, has_state = state + slot * state_stride, start >= CELL
    inside = lane[:, None] * VALUE_DIM + value[None, :]
    memory = tl.load(before + inside, real_key[:, None] & real_value[None, :] & has_state, 0.0)

    k += row * token_stride + key_head * KEY_DIM
    q += row * token_stride + key_head * KEY_DIM
    key, query = tl.load(k + lane, real_key, 0.0).to(tl.float32), tl.load(q + lane, real_key, 0.0).to(tl.float32)
    key_scale = tl.rsqrt(tl.sum(key * key, 0) + NORM_EPSILON)
    key *= key_scale
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPSILON) * (KEY_DIM**-0.5)
    gate_at = row * gate_stride + head
    g, beta = gates(tl.load(step + gate_at), tl.load(strength + gate_at), head, rates, bias, PROJECTED)
    offset = start % CELL
    cell_start = start - offset
    decays = tail_decay + tail * tail_decay_stride + head
    total = g + tl.load(decays + ((start - 1) % RING) * heads, offset > 0, 0.0)

    # Rows 0 and 1 of a matrix: the key and the query.
    pair = tl.arange(0, PAIR)[:, None]
    both = tl.where(pair == 0, key[None, :], tl.where(pair == 1, query[None, :], 0.0)).to(k.dtype.element_ty)
    tail_k += tail * tail_k_stride + key_head * KEY_DIM
    tail_u += tail * tail_u_stride + head * VALUE_DIM
    from_tail = tl.zeros((PAIR, VALUES), tl.float32)
    for low in range(0, offset, CHUNK):
        column = low + tl.arange(0, CHUNK)
        is_tail, ring = column < offset, (cell_start + column) % RING
        k_at = tail_k + ring[None, :] * (KEY_HEADS * KEY_DIM) + lane[:, None]
        keys = tl.load(k_at, real_key[:, None] & is_tail[None, :], 0.0)
        u_at = tail_u + ring[:, None] * (heads * VALUE_DIM) + value[None, :]
        corrected = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0)
        since = tl.exp(tl.where(is_tail, total - tl.load(decays + ring * heads, is_tail, 0.0), float("-inf")))
        weights = tl.dot(both, keys, input_precision=PRECISION) * since[None, :]
        from_tail = tl.dot(weights.to(corrected.dtype), corrected, from_tail, input_precision=PRECISION)

    opened = tl.exp(total)
    found = tl.sum(memory * key[:, None], 0) * opened + tl.sum(tl.where(pair == 0, from_tail, 0.0), 0)
    read = tl.sum(memory * query[:, None], 0) * opened + tl.sum(tl.where(pair == 1, from_tail, 0.0), 0)
    values = tl.load(v + row * value_stride + head * VALUE_DIM + value, real_value, 0.0).to(tl.float32)
    u = beta * (values - found)
    y_at = y + (row * heads + head) * VALUE_DIM + value
    tl.store(y_at, (read + tl.sum(key * query, 0) * u).to(y.dtype.element_ty), real_value)

    ring = start % RING
    tl.store(tail_u + ring * (heads * VALUE_DIM) + value, u.to(tail_u.dtype.element_ty), real_value)
    if tl.program_id(0) == 0:
        tl.store(decays + ring * heads, total)
        if head % SHARED == 0:
            tl.store(tail_k + ring * (KEY_HEADS * KEY_DIM) + lane, key.to(tail_k.dtype.element_ty), real_key)
    if closing >= 0:
        close_cell(before, state + closing * state_stride, has_state, k, key_scale, u, opened, total,
                   tail_k, tail_u, decays, cell_start, offset,
                   RING, KEY_HEADS, heads, KEY_DIM, VALUE_DIM, BLOCK, KEYS, VALUES, PRECISION)  # fmt: skip
