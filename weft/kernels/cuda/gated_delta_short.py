"""The gated delta rule for rows of a few tokens that end inside their cell, such as drafts to be verified.

One kernel reads the checkpoint and the tail once for all tokens of a row. What the tokens change for each other is a
triangular system of at most NEW equations, which is solved one token after the other. A row that reaches the end of
its cell must write a checkpoint, and is left to `gated_delta_walk`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.arguments import STEP
from weft.kernels.cuda.closing import load_state
from weft.kernels.cuda.gated_delta_cells import NORM_EPSILON, gates
from weft.kernels.cuda.launching import jit
from weft.kernels.cuda.tails import decay_before, is_short, open_cell, place_of

# Tokens of a short row: with their queries, as many lines as the narrowest matmul has.
NEW = 8


@triton.jit
def normalise(x):
    """Return the factors that give each row of x length 1."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPSILON)


@jit(**STEP)
def extend_short(
    q, k, token_stride, v, value_stride, y, step, strength, gate_stride, rates, bias,
    state, state_stride, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NEW: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, PROJECTED: tl.constexpr, MOST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, value head, row of several tokens).

    Tiles have 2 NEW lines: the keys of the row's tokens, then their queries. A tile of lines and tokens has as many
    columns, of which the second half is padding.
    """
    head, row = tl.program_id(1), decodes + tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * SHARED
    key_head = head // SHARED
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, CELL, NEW):
        length = at.end - at.start
        lane, value = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        real_key, real_value = lane < KEY_DIM, value < VALUE_DIM
        # The state takes longest, so it is loaded first.
        state += head * (KEY_DIM * VALUE_DIM)
        inside = lane[:, None] * VALUE_DIM + value[None, :]
        memory = load_state(state, state_stride, at, inside, real_key[:, None] & real_value[None, :], CELL)

        tail_k += at.tail * tail_k_stride + key_head * (RING * KEY_DIM)
        tail_u += at.tail * tail_u_stride + head * (RING * VALUE_DIM)
        decays = tail_decay + at.tail * tail_decay_stride + head * RING
        before = decay_before(decays, at, True, RING)

        line, new = tl.arange(0, 2 * NEW), tl.arange(0, 2 * NEW)
        for_key, of_line = line < NEW, line % NEW
        real_line, real_new = of_line < length, new < length
        line_token, new_token = (at.first + of_line).to(tl.int64), (at.first + new).to(tl.int64)
        line_at = tl.where(for_key, k + line_token * token_stride, q + line_token * token_stride) + key_head * KEY_DIM
        both = tl.load(line_at[:, None] + lane[None, :], real_line[:, None] & real_key[None, :], 0.0)
        gate_at = new_token * gate_stride + head
        raw_step, raw_strength = tl.load(step + gate_at, real_new, 0.0), tl.load(strength + gate_at, real_new, 0.0)
        g, beta = gates(raw_step, raw_strength, head, True, rates, bias, PROJECTED, MOST)
        g, beta = tl.where(real_new, g, 0.0), tl.where(real_new, beta, 0.0)
        value_at = v + line_token * value_stride + head * VALUE_DIM
        is_value = (for_key & real_line)[:, None] & real_value[None, :]
        values = tl.load(value_at[:, None] + value[None, :], is_value, 0.0).to(tl.float32)

        # Log decays since the start of the cell, of tokens as columns and as lines.
        own = of_line[:, None] == new[None, :]
        total = before + tl.cumsum(g, 0)
        line_total = tl.sum(tl.where(own, total[None, :], 0.0), 1)
        rate = tl.sum(tl.where(own, beta[None, :], 0.0), 1)
        length_one = normalise(both)
        scale = length_one * tl.where(for_key, 1.0, KEY_DIM**-0.5)
        new_scale = tl.sum(tl.where(own & for_key[:, None], length_one[:, None], 0.0), 0)

        found = tl.dot(both, memory.to(both.dtype), input_precision=PRECISION)
        found *= (scale * tl.exp(line_total))[:, None]
        for low in tl.range(0, at.offset, CHUNK, num_stages=STAGES):
            column = low + tl.arange(0, CHUNK)
            is_tail, ring = open_cell(at.start, at.offset, column, CELL, RING)
            tail_key_at = tail_k + ring[:, None] * KEY_DIM + lane[None, :]
            tail_keys = tl.load(tail_key_at, is_tail[:, None] & real_key[None, :], 0.0)
            tail_u_at = tail_u + ring[:, None] * VALUE_DIM + value[None, :]
            tail_us = tl.load(tail_u_at, is_tail[:, None] & real_value[None, :], 0.0)
            tail_total = tl.load(decays + ring, is_tail, 0.0)
            weights = tl.dot(both, tl.trans(tail_keys), input_precision=PRECISION) * scale[:, None]
            since = tl.where(is_tail[None, :], line_total[:, None] - tail_total[None, :], float("-inf"))
            weights = (weights * tl.exp(since)).to(tail_us.dtype)
            found = tl.dot(weights, tail_us, found, input_precision=PRECISION)

        # A key's line misses earlier tokens, a query's line reads its own token as well.
        seen = (new[None, :] < of_line[:, None]) | (own & (line >= NEW)[:, None])
        seen = seen & real_line[:, None] & real_new[None, :]
        among = tl.dot(both, tl.trans(both), input_precision=PRECISION) * scale[:, None] * new_scale[None, :]
        among *= tl.exp(tl.where(seen, line_total[:, None] - total[None, :], float("-inf")))
        among *= tl.where(for_key, -rate, 1.0)[:, None]
        lines = tl.where(for_key[:, None], rate[:, None] * (values - found), found)
        for token in tl.static_range(NEW):
            u = tl.sum(tl.where((line == token)[:, None], lines, 0.0), 0)
            factor = tl.sum(tl.where((new == token)[None, :], among, 0.0), 1)
            lines += factor[:, None] * u[None, :]

        y_at = y + (line_token * HEADS + head) * VALUE_DIM
        is_output = ((line >= NEW) & real_line)[:, None] & real_value[None, :]
        tl.store(y_at[:, None] + value[None, :], lines.to(y.dtype.element_ty), is_output)
        line_ring, new_ring = (at.start + of_line) % RING, (at.start + new) % RING
        u_at = tail_u + line_ring[:, None] * VALUE_DIM + value[None, :]
        tl.store(u_at, lines.to(tail_u.dtype.element_ty), is_value)
        if tl.program_id(0) == 0:
            tl.store(decays + new_ring, total, real_new)
            if head % SHARED == 0:
                keys = (both.to(tl.float32) * length_one[:, None]).to(tail_k.dtype.element_ty)
                kept = (for_key & real_line)[:, None] & real_key[None, :]
                tl.store(tail_k + line_ring[:, None] * KEY_DIM + lane[None, :], keys, kept)
