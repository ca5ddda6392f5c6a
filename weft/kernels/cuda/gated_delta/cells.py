"""The gated delta rule within cells: all work that does not need the state before a cell, for all pieces in parallel.

The corrected values u of a cell solve (I + M) u = r (v - found), where M is the effect of the cell's earlier tokens
and `found` the read of the state before the cell. Only `found` depends on that state, so the inverse is computed
here, in parallel, and `gated_delta_walk` has only matmuls left to do in sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.recurrent.tails import columns_of, decay_before, is_short, place_of

# Diagonal blocks of this size are inverted row by row; the blocks below them follow by matmuls.
SMALL = tl.constexpr(16)
NORM_EPSILON = tl.constexpr(1e-6)


@triton.jit
def softplus(x):
    # Beyond 20 softplus is the identity, and its exponential would overflow.
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def gates(step, strength, heads, real, rates, bias, PROJECTED: tl.constexpr, MOST: tl.constexpr):
    """Return the log decay and write strength of tokens, from projections or as given."""
    step, strength = step.to(tl.float32), strength.to(tl.float32)
    if PROJECTED:
        softened = softplus(step + tl.load(bias + heads, real, 0.0))
        return softened * tl.load(rates + heads, real, 0.0), MOST / (1.0 + tl.exp(-strength))
    return step, strength


@triton.jit
def invert_small(below, BLOCK: tl.constexpr):
    """Return (I + L)^-1 of each diagonal block of a strictly lower L, zeros elsewhere."""
    blocks: tl.constexpr = BLOCK // SMALL
    number = tl.arange(0, SMALL)
    own = (tl.arange(0, blocks)[:, None] == tl.arange(0, blocks)[None, :])[:, None, :, None]
    small = tl.sum(tl.where(own, tl.reshape(below, (blocks, SMALL, blocks, SMALL)), 0.0), 2)
    # Transposed, row `row` of L lies along axis 1, where it meets the inverse's rows without a shuffle between threads.
    small = tl.permute(small, (0, 2, 1))
    inverse = tl.zeros((blocks, SMALL, SMALL), tl.float32) + (number[:, None] == number[None, :])[None].to(tl.float32)
    for row in range(1, SMALL):
        factors = tl.sum(tl.where((number == row)[None, None, :], small, 0.0), 2)
        known = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where((number == row)[None, :, None], inverse - known[:, None, :], inverse)
    return tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), (BLOCK, BLOCK))


@triton.jit
def invert(below, BLOCK: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + L)^-1 of a strictly lower L of at most four small blocks a side.

    With D the inverse of the diagonal blocks and N = D (L outside of them): (I - N + N² - N³) D. Keys have length 1, so
    no entry of D or of the result exceeds 1, and N stays small: the ten bits of a half's mantissa are enough, because
    the result is stored with seven.
    """
    diagonal = invert_small(below, BLOCK)
    if BLOCK == SMALL:
        return diagonal
    block = tl.arange(0, BLOCK) // SMALL
    outside = tl.where(block[:, None] > block[None, :], below, 0.0).to(INNER)
    narrow = diagonal.to(INNER)
    nilpotent = tl.dot(narrow, outside, input_precision=PRECISION).to(INNER)
    if BLOCK > 2 * SMALL:
        squared = tl.dot(nilpotent, nilpotent, input_precision=PRECISION).to(INNER)
        diagonal = tl.dot(squared, narrow, diagonal, input_precision=PRECISION)
    return diagonal - tl.dot(nilpotent, diagonal.to(INNER), input_precision=PRECISION)


@jit(**STEP)
def solve_cells(
    q, k, token_stride, step, strength, gate_stride, rates, bias,
    systems, scales, head_keys,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PROJECTED: tl.constexpr, MOST: tl.constexpr,
    ROOM: tl.constexpr, NEW: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (value head, piece). Rows of up to NEW tokens are left to `gated_delta_short`.

    Write two matrices and five lines:

    systems[piece, head, 0]  (I + M)^-1, which maps the errors of v to u
    systems[piece, head, 1]  the same for what the queries read of the cell's u
    scales[piece, head]      for k and for q into the state before; from u into the state after; log decay of the cell;
                             rate of correction

    Keys of a tail are copied to `head_keys`, because the walk overwrites tails.
    """
    head, piece = tl.program_id(0), tl.program_id(1)
    key_head, heads = head // SHARED, KEY_HEADS * SHARED
    row, position = tl.load(piece_row + piece), tl.load(piece_position + piece)
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, ROOM, NEW):
        return
    column, lane = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    tokens = columns_of(at, position, column, CELL, RING)
    is_tail, is_new = tokens.is_tail, tokens.is_new
    own = (piece * heads + head).to(tl.int64)

    gate_at = tokens.token * gate_stride + head
    step, strength = tl.load(step + gate_at, is_new, 0.0), tl.load(strength + gate_at, is_new, 0.0)
    g, beta = gates(step, strength, head, True, rates, bias, PROJECTED, MOST)
    decays = tail_decay + at.tail * tail_decay_stride + head * RING
    total = decay_before(decays, at, position < at.start, RING) + tl.cumsum(tl.where(is_new, g, 0.0), 0)
    total = tl.where(is_tail, tl.load(decays + tokens.ring, is_tail, 0.0), total)

    key_at = tl.where(
        is_tail,
        tail_k + at.tail * tail_k_stride + (key_head * RING + tokens.ring) * KEY_DIM,
        k + tokens.token * token_stride + key_head * KEY_DIM,
    )
    real = lane[None, :] < KEY_DIM
    keys = tl.load(key_at[:, None] + lane[None, :], (is_tail | is_new)[:, None] & real, 0.0)
    if position < at.start and head % SHARED == 0:
        head_at = head_keys + (((row - decodes) * KEY_HEADS + key_head) * BLOCK + column) * KEY_DIM
        tl.store(head_at[:, None] + lane[None, :], keys, is_tail[:, None] & real)
    query_at = q + tokens.token * token_stride + key_head * KEY_DIM
    queries = tl.load(query_at[:, None] + lane[None, :], is_new[:, None] & real, 0.0)
    # Squared lengths are on the diagonals.
    diagonal = column[:, None] == column[None, :]
    below = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    key_scale = tl.rsqrt(tl.sum(tl.where(diagonal, below, 0.0), 1) + NORM_EPSILON)
    key_scale = tl.where(is_tail, 1.0, key_scale)
    squares = tl.dot(queries, tl.trans(queries), input_precision=PRECISION)
    query_scale = tl.rsqrt(tl.sum(tl.where(diagonal, squares, 0.0), 1) + NORM_EPSILON) * (KEY_DIM**-0.5)

    scale_at = scales + own * (5 * BLOCK) + column
    last = tl.sum(tl.where(column == CELL - 1, total, 0.0), 0)
    rate = tl.where(is_new, beta, 0.0)
    tl.store(scale_at, tl.exp(total) * key_scale * rate)
    tl.store(scale_at + BLOCK, tl.where(is_new, tl.exp(total) * query_scale, 0.0))
    tl.store(scale_at + 2 * BLOCK, tl.where(is_tail | is_new, tl.exp(last - total) * key_scale, 0.0))
    tl.store(scale_at + 3 * BLOCK, total)
    tl.store(scale_at + 4 * BLOCK, tl.where(is_tail, 1.0, rate))

    # Above the diagonal the exponential could overflow, so it is not computed there.
    ordered = column[:, None] >= column[None, :]
    decay = tl.exp(tl.where(ordered, total[:, None] - total[None, :], float("-inf"))) * key_scale[None, :]
    reads = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay
    reads = (reads * query_scale[:, None]).to(INNER)
    below = tl.where(diagonal, 0.0, below * decay * (key_scale * rate)[:, None])
    inverse = invert(below, BLOCK, INNER, PRECISION)
    system_at = systems + own * (2 * BLOCK * BLOCK) + column[:, None] * BLOCK + column[None, :]
    tl.store(system_at, inverse.to(systems.dtype.element_ty))
    answers = tl.dot(reads, inverse.to(INNER), input_precision=PRECISION)
    tl.store(system_at + BLOCK * BLOCK, answers.to(systems.dtype.element_ty))
