"""The gated delta rule for rows of a few tokens, such as drafts to be verified.

There are three kernels. The first computes what does not depend on values: norms, decays, and what the tokens change
for each other, a triangular system of at most NEW equations whose solution is a matrix. The second reads states and
tails. All tokens of a row are computed from the checkpoint before its first one, also if it reaches the end of its
cell: then the third writes the state there. Rows whose tokens do not fit into their tail with the rest of its cell, and
those that reach the end of a second one, are left to `gated_delta_walk`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.gated_delta.cells import NORM_EPSILON, gates
from weft.kernels.cuda.gated_delta.decode import CLOSED
from weft.kernels.cuda.launch.arguments import STEP
from weft.kernels.cuda.launch.launching import jit
from weft.kernels.cuda.launch.overlap import wait
from weft.kernels.cuda.recurrent.closing import capture, load_state, scales_of
from weft.kernels.cuda.recurrent.tails import around, decay_before, is_short, place_of

# Tokens of a short row: with their queries, as many lines as the narrowest matmul has.
NEW = 8
# Keys of a state that are read at a time.
AT_ONCE = tl.constexpr(32)
INFINITY = tl.constexpr(float("inf"))
# Rows that a program looks at together to find those that close a cell.
LOOK = tl.constexpr(128)


@triton.jit
def load_both(q, k, token_stride, at, key_head, KEY_DIM: tl.constexpr, KEYS: tl.constexpr, NEW: tl.constexpr):
    """Load the keys of a row's tokens, as the first NEW lines of a tile, and their queries as the others."""
    line, lane = tl.arange(0, 2 * NEW), tl.arange(0, KEYS)
    token = (at.first + line % NEW).to(tl.int64) * token_stride
    line_at = tl.where(line < NEW, k + token, q + token) + key_head * KEY_DIM
    real = (line % NEW < at.end - at.start)[:, None] & (lane < KEY_DIM)[None, :]
    return tl.load(line_at[:, None] + lane[None, :], real, 0.0)


@triton.jit
def solve_tile(
    q, k, token_stride, step, strength, gate_stride, rates, bias, systems, factors,
    tail_k, decays, before, at, key_head, own,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEYS: tl.constexpr, NEW: tl.constexpr, TILE: tl.constexpr, PROJECTED: tl.constexpr,
    MOST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do what `solve_short` does for a row of at most TILE tokens, with all value heads of a key head at once."""
    lane, shared, line, new = tl.arange(0, KEYS), tl.arange(0, HEADS), tl.arange(0, 2 * TILE), tl.arange(0, 2 * TILE)
    length, real_key = at.end - at.start, lane < KEY_DIM
    is_head, head = shared < SHARED, key_head * SHARED + shared
    for_key, of_line, real_new = line < TILE, line % TILE, new < length
    real_line = of_line < length
    # Where lines stand among those of NEW tokens.
    line_at, new_at = line // TILE * NEW + of_line, new // TILE * NEW + new % TILE

    # Issue all loads before anything waits for them.
    both = load_both(q, k, token_stride, at, key_head, KEY_DIM, KEYS, TILE)
    gate_at = (at.first + new).to(tl.int64)[None, :] * gate_stride + head[:, None]
    is_gate = is_head[:, None] & real_new[None, :]
    raw_step, raw_strength = tl.load(step + gate_at, is_gate, 0.0), tl.load(strength + gate_at, is_gate, 0.0)
    g, beta = gates(raw_step, raw_strength, head[:, None], is_head[:, None], rates, bias, PROJECTED, MOST)
    g, beta = tl.where(is_gate, g, 0.0), tl.where(is_gate, beta, 0.0)

    # Squared lengths are products of a line with itself. Sums of squares would need twice the registers.
    products = tl.dot(both, tl.trans(both), input_precision=PRECISION)
    squares = tl.sum(tl.where(line[:, None] == new[None, :], products, 0.0), 1)
    length_one = tl.rsqrt(squares + NORM_EPSILON)
    scale = length_one * tl.where(for_key, 1.0, KEY_DIM**-0.5)
    itself = of_line[:, None] == new[None, :]
    new_scale = tl.sum(tl.where(itself & for_key[:, None], length_one[:, None], 0.0), 0)
    # Log decays since the start of the cell, of tokens as columns and as lines.
    total = before[:, None] + tl.cumsum(g, 1)
    line_total = tl.sum(tl.where(itself[None, :, :], total[:, None, :], 0.0), 2)
    rate = tl.sum(tl.where(itself[None, :, :], beta[:, None, :], 0.0), 2)
    place = (own * (KEY_HEADS * SHARED) + head).to(tl.int64)
    factor_at = factors + place[:, None] * (8 * NEW) + line_at[None, :]
    is_factor = is_head[:, None] & real_line[None, :]
    tl.store(factor_at, scale[None, :] * tl.exp(line_total), is_factor)
    tl.store(factor_at + 2 * NEW, rate, is_factor)
    tl.store(factor_at + 4 * NEW, scale[None, :] + tl.zeros_like(line_total), is_factor)
    tl.store(factor_at + 6 * NEW, line_total, is_factor)

    alike = products * scale[:, None] * new_scale[None, :]
    # A key's line misses earlier tokens, a query's line reads its own token as well.
    seen = (new[None, :] < of_line[:, None]) | (itself & (line >= TILE)[:, None])
    seen = (seen & real_line[:, None] & real_new[None, :])[None, :, :]
    among = alike[None, :, :] * tl.exp(tl.where(seen, line_total[:, :, None] - total[:, None, :], -INFINITY))
    among *= tl.where(for_key[None, :], -rate, 1.0)[:, :, None]
    system = tl.where((line[:, None] == new[None, :])[None, :, :], 1.0, 0.0) + tl.zeros_like(among)
    for token in range(length):
        solved = tl.sum(tl.where((line == token)[None, :, None], system, 0.0), 1)
        missed = tl.sum(tl.where((new == token)[None, None, :], among, 0.0), 2)
        system += missed[:, :, None] * solved[:, None, :]
    system_at = systems + place[:, None, None] * (4 * NEW * NEW) + line_at[None, :, None] * (2 * NEW)
    is_system = is_factor[:, :, None] & (new % TILE < length)[None, None, :]
    tl.store(system_at + new_at[None, None, :], system, is_system)

    # Tokens after the end of the cell belong to the next one.
    closed = tl.sum(tl.where((at.offset + new == CELL - 1)[None, :], total, 0.0), 1)
    total = tl.where((at.offset + new < CELL)[None, :], total, total - closed[:, None])
    tl.store(decays[:, None] + ((at.start + new) % RING)[None, :], total, is_gate)
    new_keys = (both.to(tl.float32) * length_one[:, None]).to(tail_k.dtype.element_ty)
    kept = (for_key & real_line)[:, None] & real_key[None, :]
    tl.store(tail_k + ((at.start + of_line) % RING)[:, None] * KEY_DIM + lane[None, :], new_keys, kept)


@triton.jit
def list_closing(
    closing, own, rows, row_start, row_first, row_slot, row_tail, row_closing, piece_slot, first_piece, decodes,
    CELL: tl.constexpr, ROOM: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Enter a row into the list of those that close a cell, if it does; the last one enters their number."""
    earlier, all_of_them, closes = 0, 0, 0
    for low in range(0, rows, LOOK):
        row = low + tl.arange(0, LOOK)
        at = place_of(decodes + row, row_start, row_first, row_slot, row_tail, row_closing, CELL, row < rows)
        ends = (row < rows) & is_short(at, ROOM, NEW) & (at.offset + at.end - at.start >= CELL)
        wanted = tl.load(piece_slot + tl.load(first_piece + row, ends, 0), ends, -1) >= 0
        all_of_them += tl.sum(wanted.to(tl.int32), 0)
        earlier += tl.sum((wanted & (row < own)).to(tl.int32), 0)
        closes += tl.sum((wanted & (row == own)).to(tl.int32), 0)
    tl.store(closing + 1 + earlier, own, closes > 0)
    tl.store(closing, all_of_them, own == rows - 1)


@jit(**STEP)
def solve_short(
    q, k, token_stride, step, strength, gate_stride, rates, bias, systems, factors, closing,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, NEW: tl.constexpr,
    PROJECTED: tl.constexpr, MOST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (key head, row of several tokens). Append keys and decays to the tail, and write

    systems[row, head]  the matrix that maps what keys and queries find to u and outputs
    factors[row, head]  of keys and queries into the checkpoint; rates of correction; scales that give keys and queries
                        their length; log decays since the start of the cell
    closing             if given: the number of rows whose state at the end of a cell is wanted, then those rows

    All are undefined for tokens that the row does not have. Half a tile costs less, and most rows fit into one.
    """
    key_head, own = tl.program_id(0), tl.program_id(1)
    at = place_of(decodes + own, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, ROOM, NEW):
        shared = tl.arange(0, HEADS)
        tail_k += at.tail * tail_k_stride + key_head * (RING * KEY_DIM)
        decays = tail_decay + at.tail * tail_decay_stride + (key_head * SHARED + shared) * RING
        before = decay_before(decays, at, shared < SHARED, RING)
        wait(EARLY)
        if at.end - at.start <= NEW // 2:
            solve_tile(
                q, k, token_stride, step, strength, gate_stride, rates, bias, systems, factors,
                tail_k, decays, before, at, key_head, own, CELL, RING, KEY_HEADS, SHARED, HEADS,
                KEY_DIM, KEYS, NEW, NEW // 2, PROJECTED, MOST, PRECISION,
            )  # fmt: skip
        else:
            solve_tile(
                q, k, token_stride, step, strength, gate_stride, rates, bias, systems, factors,
                tail_k, decays, before, at, key_head, own, CELL, RING, KEY_HEADS, SHARED, HEADS,
                KEY_DIM, KEYS, NEW, NEW, PROJECTED, MOST, PRECISION,
            )  # fmt: skip
    else:
        # No kernel ends before those that it follows.
        wait(EARLY)
    if closing is not None:
        rows = tl.num_programs(1)
        ends = is_short(at, ROOM, NEW) & (at.offset + at.end - at.start >= CELL)
        if (key_head == 0) & (ends | (own == rows - 1)):
            list_closing(
                closing, own, rows, row_start, row_first, row_slot, row_tail, row_closing, piece_slot, first_piece,
                decodes, CELL, ROOM, NEW,
            )  # fmt: skip


@triton.jit
def held(x, EARLY: tl.constexpr):
    """Return x, loaded before.

    A tensor that goes from memory to a matmul only is waited for where it is loaded. An instruction that does nothing
    moves that here, so that the state is asked for before the tail has come.
    """
    if EARLY:
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=pack)
    return x


@triton.jit
def close_columns(
    state, state_stride, state_scales, head, slot, at, tail_k, tail_u, decays, value,
    CELL: tl.constexpr, RING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write columns of the state at the end of a row's first cell, all of which is in the tail by now."""
    column, real_value = tl.arange(0, BLOCK), value < VALUE_DIM
    is_tail, opening = column < CELL, (at.start - at.offset) % RING
    ring = around(opening, column, RING)
    total, until = tl.load(decays + around(opening, CELL - 1, RING)), tl.load(decays + ring, is_tail, 0.0)
    u_at = tail_u + (ring[:, None] * VALUE_DIM + value[None, :])
    u = tl.load(u_at, is_tail[:, None] & real_value[None, :], 0.0)
    scaled = u.to(tl.float32) * tl.exp(tl.where(is_tail, total - until, -INFINITY))[:, None]
    opened = tl.exp(total)
    for low in tl.range(0, KEYS, min(CLOSED, KEYS), num_stages=STAGES):
        lane = low + tl.arange(0, min(CLOSED, KEYS))
        real_key = lane < KEY_DIM
        inside = lane[:, None] * VALUE_DIM + value[None, :]
        real = real_key[:, None] & real_value[None, :]
        scales = scales_of(
            state_scales, head, low, value, real_value, min(CLOSED, KEYS), KEY_DIM, VALUE_DIM
        )  # fmt: skip
        memory = load_state(state, state_stride, at, inside, real, CELL, scales)
        keys_at = tail_k + (lane[:, None] + ring[None, :] * KEY_DIM)
        keys = tl.load(keys_at, real_key[:, None] & is_tail[None, :], 0.0)
        memory = tl.dot(keys.to(tl.float32), scaled, memory * opened, input_precision=PRECISION)
        capture(state, state_stride, slot, inside, memory, real, scales)


@jit(**STEP)
def read_short(
    q, k, token_stride, v, value_stride, y, systems, factors,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NEW: tl.constexpr, ALONE: tl.constexpr, CLOSES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, value head, row of several tokens). If it runs ALONE, other rows are padding.

    CLOSES: it writes the state at the end of a cell, too. Otherwise `close_short` does.

    Tokens are older than the kernel before it, so only that one's results are waited for, when the state has been read.
    """
    head, own = tl.program_id(1), tl.program_id(2)
    key_head, heads = head // SHARED, KEY_HEADS * SHARED
    value = tl.arange(0, VALUES)
    if VALUES < VALUE_DIM:
        value += tl.program_id(0) * VALUES
    real_value = value < VALUE_DIM
    at = place_of(decodes + own, row_start, row_first, row_slot, row_tail, row_closing, CELL)
    if is_short(at, ROOM, NEW):
        column, line, other = tl.arange(0, BLOCK), tl.arange(0, 2 * NEW), tl.arange(0, 2 * NEW)
        for_key, of_line, length = line < NEW, line % NEW, at.end - at.start
        real_line, first = of_line < length, at.first.to(tl.int64)
        state += head * (KEY_DIM * VALUE_DIM)
        tail_k += at.tail * tail_k_stride + key_head * (RING * KEY_DIM)
        tail_u += at.tail * tail_u_stride + head * (RING * VALUE_DIM)
        is_tail, ring = column < at.offset, around((at.start - at.offset) % RING, column, RING)
        is_u = is_tail[:, None] & real_value[None, :]
        corrected = tl.load(tail_u + (ring[:, None] * VALUE_DIM + value[None, :]), is_u, 0.0)
        is_value = (for_key & real_line)[:, None] & real_value[None, :]
        value_at = v + first * value_stride + head * VALUE_DIM + (of_line[:, None] * value_stride + value[None, :])
        values = tl.load(value_at, is_value, 0.0)
        line_at = tl.where(for_key, k, q) + first * token_stride + key_head * KEY_DIM + of_line * token_stride
        found = tl.zeros([2 * NEW, VALUES], tl.float32)
        scores = tl.zeros([2 * NEW, BLOCK], tl.float32)
        for low in tl.range(0, KEYS, min(AT_ONCE, KEYS), num_stages=3):
            lane = low + tl.arange(0, min(AT_ONCE, KEYS))
            real_key = lane == lane if KEYS == KEY_DIM else lane < KEY_DIM
            inside = lane[:, None] * VALUE_DIM + value[None, :]
            scales = scales_of(
                state_scales, head, low, value, real_value, min(AT_ONCE, KEYS), KEY_DIM, VALUE_DIM
            )  # fmt: skip
            real = real_key[:, None] & real_value[None, :]
            memory = load_state(state, state_stride, at, inside, real, CELL, scales)
            both = tl.load(line_at[:, None] + lane[None, :], real_line[:, None] & real_key[None, :], 0.0)
            keys_at = tail_k + (ring[:, None] * KEY_DIM + lane[None, :])
            keys = tl.load(keys_at, is_tail[:, None] & real_key[None, :], 0.0)
            scores = tl.dot(both, tl.trans(keys), scores, input_precision=PRECISION)
            found = tl.dot(both, memory.to(both.dtype), found, input_precision=PRECISION)

        wait(EARLY)
        place = (own * heads + head).to(tl.int64)
        factor_at = factors + place * (8 * NEW) + line
        factor, rate = tl.load(factor_at, real_line, 0.0), tl.load(factor_at + 2 * NEW, real_line, 0.0)
        # Weights are zero beyond the tail and for tokens that the row does not have.
        scale, total = tl.load(factor_at + 4 * NEW, real_line, 0.0), tl.load(factor_at + 6 * NEW, real_line, -INFINITY)
        until = tl.load(tail_decay + at.tail * tail_decay_stride + head * RING + ring, is_tail, INFINITY)
        is_system = real_line[:, None] & (other % NEW < length)[None, :]
        system_at = systems + place * (4 * NEW * NEW) + (line[:, None] * (2 * NEW) + other[None, :])
        system = tl.load(system_at, is_system, 0.0)
        weighed = scores * scale[:, None] * tl.exp(total[:, None] - until[None, :])
        corrected = held(corrected, EARLY)
        found = tl.dot(weighed.to(corrected.dtype), corrected, found * factor[:, None], input_precision=PRECISION)
        found = tl.where(for_key[:, None], rate[:, None] * (values.to(tl.float32) - found), found)
        lines = tl.dot(system, found, input_precision=PRECISION)
        is_output = ((line >= NEW) & real_line)[:, None] & real_value[None, :]
        y_at = y + (first * heads + head) * VALUE_DIM + (of_line[:, None] * (heads * VALUE_DIM) + value[None, :])
        tl.store(y_at, lines.to(y.dtype.element_ty), is_output)
        u_at = tail_u + (around(at.start % RING, of_line, RING)[:, None] * VALUE_DIM + value[None, :])
        tl.store(u_at, lines.to(tail_u.dtype.element_ty), is_value)
        if CLOSES and at.offset + length >= CELL:
            slot = tl.load(piece_slot + tl.load(first_piece + own))
            if slot >= 0:
                # Other threads of this program wrote what these read.
                tl.debug_barrier()
                close_columns(
                    state, state_stride, state_scales, head, slot, at, tail_k, tail_u,
                    tail_decay + at.tail * tail_decay_stride + head * RING, value,
                    CELL, RING, KEY_DIM, VALUE_DIM, BLOCK, KEYS, 1, PRECISION,
                )  # fmt: skip
    else:
        wait(EARLY)
        if ALONE:
            # Padding has finite outputs.
            for number in range(at.end - at.start):
                y_at = y + ((at.first + number).to(tl.int64) * heads + head) * VALUE_DIM + value
                tl.store(y_at, tl.zeros([VALUES], y.dtype.element_ty), real_value)


@jit(**STEP)
def close_short(
    closing,
    state, state_stride, state_scales, tail_k, tail_k_stride, tail_u, tail_u_stride, tail_decay, tail_decay_stride,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    CELL: tl.constexpr, RING: tl.constexpr, ROOM: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    STAGES: tl.constexpr, NEW: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of value columns, value head, turn). Write the states at the ends of cells that short rows reach.

    `solve_short` has listed the rows. It is older than the kernel before this one, so the list is not waited for.
    """
    head = tl.program_id(1)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    for number in range(tl.program_id(2), tl.load(closing, cache_modifier=".cg"), tl.num_programs(2)):
        own = tl.load(closing + 1 + number, cache_modifier=".cg")
        slot = tl.load(piece_slot + tl.load(first_piece + own))
        at = place_of(decodes + own, row_start, row_first, row_slot, row_tail, row_closing, CELL)
        wait(EARLY)
        close_columns(
            state + head * (KEY_DIM * VALUE_DIM), state_stride, state_scales, head, slot, at,
            tail_k + at.tail * tail_k_stride + head // SHARED * (RING * KEY_DIM),
            tail_u + at.tail * tail_u_stride + head * (RING * VALUE_DIM),
            tail_decay + at.tail * tail_decay_stride + head * RING, value,
            CELL, RING, KEY_DIM, VALUE_DIM, BLOCK, KEYS, STAGES, PRECISION,
        )  # fmt: skip
    wait(EARLY)
