"""The delta rule with decays by channel for rows of several tokens, in two consecutive kernels.

solve   by piece and head: everything that does not need the state before a cell (see `gated_delta/cells.py`)
walk    by row and block of a head's value columns: the row's cells in order, the state in registers
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.channel_delta.decode import channel_gates
from weft.kernels.cuda.gated_delta.cells import NORM_EPSILON, invert
from weft.kernels.cuda.gated_delta.decode import add_both
from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.recurrent.closing import capture_halves, half, load_state, scales_of
from weft.kernels.cuda.recurrent.tails import columns_of, decay_before, kept_from, place_of


@triton.jit
def weigh_pairs(keys, queries, total, units, totals, count, KEY_DIM: tl.constexpr):
    """Return the weights of a cell's first `count` tokens (columns) for its keys and its queries (lines).

    Each channel decays on its own, so that no matmul computes them. An exponential is of the difference between a token
    and an earlier one: one of both tokens alone could overflow.
    """
    BLOCK: tl.constexpr = keys.shape[0]
    column, lane = tl.arange(0, BLOCK), tl.arange(0, keys.shape[1])
    for_keys, for_queries = tl.zeros((BLOCK, BLOCK), tl.float32), tl.zeros((BLOCK, BLOCK), tl.float32)
    for token in range(count):
        key = tl.load(units + token * KEY_DIM + lane, lane < KEY_DIM, 0.0).to(tl.float32)
        then = tl.load(totals + token * KEY_DIM + lane, lane < KEY_DIM, 0.0)
        since = tl.where((column >= token)[:, None], total - then[None, :], float("-inf"))
        decayed = tl.exp(since) * key[None, :]
        of_keys, of_queries = tl.reduce((keys * decayed, queries * decayed), 1, add_both)
        for_keys = tl.where(column[None, :] == token, of_keys[:, None], for_keys)
        for_queries = tl.where(column[None, :] == token, of_queries[:, None], for_queries)
    return for_keys, for_queries


@jit(**STEP)
def solve_channels(
    q, k, token_stride, step, step_stride, strength, strength_stride, rates, bias,
    systems, operands, units, totals, scales,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (head, piece). Write, for the tokens of the piece's cell,

    systems   as `solve_cells` does
    operands  keys decayed since the cell's start, times the rate of correction; queries decayed so; keys decayed to
              the cell's end
    units     keys of length 1
    totals    log decays since the cell's start
    scales    rate of correction; 1 for tokens of the tail, whose u are known
    """
    head, piece = tl.program_id(0), tl.program_id(1)
    position = tl.load(piece_position + piece)
    at = place_of(tl.load(piece_row + piece), row_start, row_first, row_slot, row_tail, row_closing, CELL)
    column, lane = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    tokens = columns_of(at, position, column, CELL, RING)
    real = lane[None, :] < KEY_DIM
    is_tail, is_new = tokens.is_tail[:, None] & real, tokens.is_new[:, None] & real
    own = (piece * HEADS + head).to(tl.int64)
    units, totals = units + own * (BLOCK * KEY_DIM), totals + own * (BLOCK * KEY_DIM)
    tail_at = (head * RING + tokens.ring[:, None]) * KEY_DIM + lane[None, :]
    source = head * KEY_DIM + lane[None, :]

    raw_step = tl.load(step + tokens.token[:, None] * step_stride + source, is_new, 0.0)
    raw_strength = tl.load(strength + tokens.token * strength_stride + head, tokens.is_new, 0.0)
    g, beta = channel_gates(raw_step, raw_strength, head, lane[None, :], real, rates, bias, KEY_DIM)
    decays = tail_decay + at.tail * tail_decay_stride
    own_decays = decays + head * (RING * KEY_DIM) + lane[None, :]
    before = decay_before(own_decays, at, real & (position < at.start), RING, KEY_DIM)
    total = before + tl.cumsum(tl.where(is_new, g, 0.0), 0)
    total = tl.where(is_tail, tl.load(decays + tail_at, is_tail, 0.0), total)

    kept = tl.load(tail_k + at.tail * tail_k_stride + tail_at, is_tail, 0.0).to(tl.float32)
    keys = tl.load(k + tokens.token[:, None] * token_stride + source, is_new, 0.0).to(tl.float32)
    keys *= tl.rsqrt(tl.sum(keys * keys, 1) + NORM_EPSILON)[:, None]
    # Rounded as in a tail, so that a cell's numbers do not depend on where a row starts.
    keys = tl.where(is_tail, kept, keys).to(units.dtype.element_ty)
    queries = tl.load(q + tokens.token[:, None] * token_stride + source, is_new, 0.0).to(tl.float32)
    queries *= (tl.rsqrt(tl.sum(queries * queries, 1) + NORM_EPSILON) * (KEY_DIM**-0.5))[:, None]
    inside = column[:, None] * KEY_DIM + lane[None, :]
    tl.store(units + inside, keys, real)
    tl.store(totals + inside, total, real)
    # Other threads read them below.
    tl.debug_barrier()

    keys = keys.to(tl.float32)
    rate = tl.where(tokens.is_new, beta, 0.0)
    last = tl.sum(tl.where((column == CELL - 1)[:, None], total, 0.0), 0)
    operands += own * (3 * BLOCK * KEY_DIM) + inside
    kind: tl.constexpr = operands.dtype.element_ty
    tl.store(operands, (keys * tl.exp(total) * rate[:, None]).to(kind), real)
    tl.store(operands + BLOCK * KEY_DIM, (queries * tl.exp(total)).to(kind), real)
    tl.store(operands + 2 * BLOCK * KEY_DIM, (keys * tl.exp(last[None, :] - total)).to(kind), real)
    tl.store(scales + own * BLOCK + column, tl.where(tokens.is_tail, 1.0, rate))

    below, reads = weigh_pairs(keys, queries, total, units, totals, tl.minimum(at.end - position, CELL), KEY_DIM)
    below = tl.where(column[:, None] == column[None, :], 0.0, below * rate[:, None])
    inverse = invert(below, BLOCK, INNER, PRECISION)
    systems += own * (2 * BLOCK * BLOCK) + column[:, None] * BLOCK + column[None, :]
    tl.store(systems, inverse.to(kind))
    answers = tl.dot(reads.to(INNER), inverse.to(INNER), input_precision=PRECISION)
    tl.store(systems + BLOCK * BLOCK, answers.to(kind))


@triton.jit
def keep_lines(
    source, target, at, kept,
    CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store a head's lines of a row's positions from `kept` on in its tail. `source` are those of its first piece."""
    lane = tl.arange(0, LANES)
    for low in range(kept, at.end, BLOCK):
        position = low + tl.arange(0, BLOCK)
        stays = (position < at.end)[:, None] & (lane < SIZE)[None, :]
        line = (position // CELL - at.start // CELL).to(tl.int64) * (HEADS * BLOCK) + position % CELL
        values = tl.load(source + line[:, None] * SIZE + lane[None, :], stays, 0.0)
        tl.store(target + (position % RING)[:, None] * SIZE + lane[None, :], values, stays)


@jit(**STEP)
def walk_channels(
    v, value_stride, y, systems, operands, units, totals, scales,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, head, row of several tokens)."""
    head, long_row = tl.program_id(1), tl.program_id(2)
    at = place_of(decodes + long_row, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    begin, stop = tl.load(first_piece + long_row), tl.load(first_piece + long_row + 1)
    kept, opening = kept_from(at, CELL, RING), at.start - at.offset
    double, column, lane = tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK), tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    real_key, real_value = (lane < KEY_DIM)[None, :], (value < VALUE_DIM)[None, :]
    state += head * (KEY_DIM * VALUE_DIM)
    inside = lane[:, None] * VALUE_DIM + value[None, :]
    scales_at = scales_of(state_scales, head, 0, value, value < VALUE_DIM, KEYS, KEY_DIM, VALUE_DIM)
    real_state = (lane < KEY_DIM)[:, None] & real_value
    memory = load_state(state, state_stride, at, inside, real_state, CELL, scales_at)
    tail_u += at.tail * tail_u_stride + head * (RING * VALUE_DIM)
    for piece in tl.range(begin, stop, num_stages=STAGES):
        tokens = columns_of(at, opening + (piece - begin) * CELL, column, CELL, RING)
        own = (piece * HEADS + head).to(tl.int64)
        operand_at = operands + own * (3 * BLOCK * KEY_DIM) + lane[None, :]
        both = tl.load(operand_at + double[:, None] * KEY_DIM, real_key, 0.0)
        keys = tl.load(operand_at + (2 * BLOCK + column[:, None]) * KEY_DIM, real_key, 0.0)
        system = tl.load(systems + own * (2 * BLOCK * BLOCK) + double[:, None] * BLOCK + column[None, :])
        last = tl.load(totals + (own * BLOCK + CELL - 1) * KEY_DIM + lane, lane < KEY_DIM, 0.0)
        rate = tl.load(scales + own * BLOCK + column)
        tail_at = tail_u + tokens.ring[:, None] * VALUE_DIM + value[None, :]
        value_at = v + tokens.token[:, None] * value_stride + head * VALUE_DIM + value[None, :]
        is_tail, is_new = tokens.is_tail[:, None] & real_value, tokens.is_new[:, None] & real_value
        values = tl.load(tl.where(is_tail, tail_at, value_at), is_tail | is_new, 0.0).to(tl.float32)

        found = tl.dot(both, memory.to(both.dtype), input_precision=PRECISION)
        missing = values * rate[:, None] - half(found, double < BLOCK, BLOCK, VALUES)
        solved = tl.dot(system, missing.to(both.dtype), input_precision=PRECISION)
        u = half(solved, double < BLOCK, BLOCK, VALUES)
        read = half(found + solved, double >= BLOCK, BLOCK, VALUES)
        memory = tl.dot(tl.trans(keys), u.to(both.dtype), memory * tl.exp(last)[:, None], input_precision=PRECISION)

        y_at = y + (tokens.token[:, None] * HEADS + head) * VALUE_DIM + value[None, :]
        tl.store(y_at, read.to(y.dtype.element_ty), is_new)
        tl.store(tail_at, u.to(tail_u.dtype.element_ty), is_new & (tokens.position >= kept)[:, None])
        memory = capture_halves(
            state, state_stride, tl.load(piece_slot + piece), memory, value, KEY_DIM, VALUE_DIM, scales_at
        )  # fmt: skip

    if tl.program_id(0) == 0:
        own = (begin * HEADS + head).to(tl.int64) * (BLOCK * KEY_DIM)
        tail_k += at.tail * tail_k_stride + head * (RING * KEY_DIM)
        tail_decay += at.tail * tail_decay_stride + head * (RING * KEY_DIM)
        keep_lines(units + own, tail_k, at, kept, CELL, RING, HEADS, KEY_DIM, BLOCK, KEYS)
        keep_lines(totals + own, tail_decay, at, kept, CELL, RING, HEADS, KEY_DIM, BLOCK, KEYS)
