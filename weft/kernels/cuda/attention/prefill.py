"""Paged attention for rows of several tokens, in Triton: a block of queries of one cell over all cells that it sees.

Queries come in the pieces of a batch (tokens of one row in one cell), so a block of them sees every earlier cell
whole and only its own cell in part: masks are needed only there and at a window's edge. All heads of a group share a
block. Where blocks are too few to occupy the GPU, as with a short prompt after a long cached one, several programs
share the cells of a block, and the last to finish merges all results, always in the same order. A query's cells and
how they are shared depend on its position alone, never on where its row starts. This kernel writes no pages.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.cuda.attention.decode import multiprocessors_of
from weft.kernels.cuda.attention.pages import powers_at
from weft.kernels.cuda.launch.arguments import STEP, cache_of, pages_of, pieces_of, records_drafts, rows_of
from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.interface import Batch

LOG2_E = tl.constexpr(1.4426950408889634)


class PrefillLaunch(NamedTuple):
    block: int  # queries times heads of a group
    warps: int
    stages: int


# By bytes of a head's key, padded to a power of two.
LAUNCHES = {128: PrefillLaunch(128, 4, 3), 256: PrefillLaunch(64, 4, 3), 512: PrefillLaunch(128, 8, 2)}
# Maximum tokens of rows whose blocks have their own size, such as drafts, and the warps that compute one.
SHORT, SHORT_WARPS = 8, 4
# All other cases: float32 heads too large for several stages in shared memory, and tests' small ones.
PLAIN_LAUNCH = PrefillLaunch(16, 4, 1)


class PrefillSharing(NamedTuple):
    """Maximum number of programs that share a block's cells, and minimum number of cells of each."""

    shares: int
    least_cells: int


ALONE = PrefillSharing(1, 1)
SHARED = PrefillSharing(8, 16)
# Programs per multiprocessor that are enough without sharing.
ENOUGH = 8
# Upper bound on the programs that share work.
COUNTERS = 1 << 16


def attend_pieces(
    q: Tensor,
    out: Tensor,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    launch: PrefillLaunch | None = None,
    sharing: PrefillSharing | None = None,
) -> None:
    """Attend for all tokens of `q` [tokens, heads, head_dim] after the leading `batch.decodes` into those of `out`."""
    heads, head_dim = q.shape[1:]
    _, cell, kv_heads, _ = view.keys.shape
    group = heads // kv_heads
    block_dim = max(16, power_of_two(head_dim))
    most = cell
    if launch is None:
        launch = LAUNCHES.get(block_dim * q.element_size(), PLAIN_LAUNCH)
        # A given sharing is that of exact operations, whose blocks do not depend on other rows.
        if sharing is None and records_drafts(batch, SHORT):
            launch, most = PrefillLaunch(launch.block, SHORT_WARPS, launch.stages), min(cell, batch.longest)
    # No more queries than a piece can have, no fewer than one.
    block = max(16, min(launch.block, power_of_two(most * group)), power_of_two(group))
    queries = min(block // group, cell)
    blocks = -(-most // queries)
    programs = batch.pieces * blocks * kv_heads
    shares, least_cells = sharing or choose_sharing(programs, view.window, cell, multiprocessors_of(q.device))
    # The result of every share's queries, then the logarithms of the sums that it was divided by.
    size = programs * shares * block * (block_dim + 1) if shares > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=q.device)
    assert shares == 1 or programs <= COUNTERS
    _attend_block[(batch.pieces * blocks, kv_heads, shares)](
        named(
            q_ptr=q, q_token_stride=q.stride(0), q_head_stride=q.stride(1), scale=scale, out_ptr=out,
            out_token_stride=out.stride(0), parts_ptr=parts, come_ptr=counters(q.device),
            sinks_ptr=out if sinks is None else sinks,
        ),
        cache_of(view), pages_of(batch, view), rows_of(batch), pieces_of(batch),
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_DIM=block_dim, CELL=cell,
        BLOCK=block, QUERIES=queries, BLOCKS=blocks, PADDED=blocks * queries < cell, SHARES=shares,
        LEAST_CELLS=least_cells,
        WINDOW=view.window or 0, SOFTCAP=softcap or 0.0,
        HAS_SINKS=sinks is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def choose_sharing(programs: int, window: int | None, cell: int, multiprocessors: int) -> PrefillSharing:
    """Share blocks only if there are too few programs and rows see far.

    >>> choose_sharing(160, None, 64, 132)
    PrefillSharing(shares=8, least_cells=16)
    >>> choose_sharing(2048, None, 64, 132) == choose_sharing(160, 128, 64, 132) == ALONE
    True
    """
    is_near = window is not None and window <= SHARED.least_cells * cell
    return ALONE if is_near or programs >= ENOUGH * multiprocessors else SHARED


@cache
def counters(device: torch.device) -> Tensor:
    """Return the counters of finished shares per block. Every launch leaves them at zero."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _mix_cell(
    q, peak, total, mixed, keys_ptr, values_ptr, key_exponents, value_exponents, exponents_at,
    loaded, there, visible, scale,
    SOFTCAP: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Advance the running softmax of a block of queries by one cell. All of them see a WHOLE cell."""
    keys = (tl.load(keys_ptr) if loaded is None else tl.load(keys_ptr, mask=loaded, other=0.0)).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if key_exponents is not None:
        scores *= powers_at(key_exponents, exponents_at, there)[None, :]
    factor = scale * LOG2_E
    if SOFTCAP > 0:
        scores = SOFTCAP * (2 * tl.sigmoid(2 * scale / SOFTCAP * scores) - 1)
        factor = LOG2_E
    if not WHOLE:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    # A query that has seen nothing yet: any finite number works.
    reference = new_peak if WHOLE else tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - reference[:, None])
    fading = tl.exp2(peak - reference)
    total = total * fading + tl.sum(weights, 1)
    if value_exponents is not None:
        weights *= powers_at(value_exponents, exponents_at, there)[None, :]
    values = (tl.load(values_ptr) if loaded is None else tl.load(values_ptr, mask=loaded, other=0.0)).to(q.dtype)
    mixed = tl.dot(weights.to(values.dtype), values, acc=mixed * fading[:, None], input_precision=PRECISION)
    return new_peak, total, mixed


@triton.jit
def _fill(out_ptr, first, last, out_token_stride, head, is_head, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Fill the outputs of some heads of tokens with zeros."""
    feature = tl.arange(0, BLOCK_DIM)
    for token in range(first, last):
        place = tl.cast(token, tl.int64) * out_token_stride + head[:, None] * HEAD_DIM + feature[None, :]
        nothing = tl.zeros([head.shape[0], BLOCK_DIM], out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, nothing, mask=is_head[:, None] & (feature < HEAD_DIM)[None, :])


@triton.jit
def _merge_shares(parts_ptr, sums_ptr, shares, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Merge the results of a block's shares into its running softmax."""
    line, feature = tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, BLOCK_DIM], tl.float32)
    for share in range(shares):
        at = share * BLOCK + line
        # Other programs wrote them: bypass this multiprocessor's cache.
        found = tl.load(sums_ptr + at, cache_modifier=".cg")
        part = tl.load(parts_ptr + at[:, None] * BLOCK_DIM + feature[None, :], cache_modifier=".cg")
        new_peak = tl.maximum(peak, found)
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight, fading = tl.exp2(found - reference), tl.exp2(peak - reference)
        mixed = mixed * fading[:, None] + part * weight[:, None]
        total = total * fading + weight
        peak = new_peak
    return peak, total, mixed


@jit(**STEP)
def _attend_block(
    q_ptr, q_token_stride, q_head_stride, scale, out_ptr, out_token_stride, parts_ptr, come_ptr, sinks_ptr,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
    positions, write_page, page_first, page_bounds, page_list,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CELL: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr,
    SHARES: tl.constexpr, LEAST_CELLS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for up to QUERIES tokens of one piece, the heads of one group of each: line i is token i // GROUP.

    Pieces with more tokens than BLOCKS blocks are PADDED: the outputs of the others are zeros.
    """
    # Later pieces of a row see more: start them first, so that no long one is left at the end.
    number, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    piece = number // BLOCKS
    row = tl.load(piece_row + piece)
    own_cell = tl.load(piece_position + piece) // CELL
    start, first = tl.load(row_start + row), tl.load(row_first + row)
    row_end = start + tl.load(row_first + row + 1) - first
    low = tl.maximum(start, own_cell * CELL) + number % BLOCKS * QUERIES
    high = tl.minimum(tl.minimum(row_end, (own_cell + 1) * CELL), low + QUERIES)
    if low >= high:
        return
    line = tl.arange(0, BLOCK)
    position = low + line // GROUP
    head = kv_head * GROUP + line % GROUP
    feature, index = tl.arange(0, BLOCK_DIM), tl.arange(0, CELL)
    is_feature = feature < HEAD_DIM
    if PADDED:
        end = tl.where(number % BLOCKS == BLOCKS - 1, tl.minimum(row_end, (own_cell + 1) * CELL), high) + first - start
        _fill(out_ptr, first + high - start, end, out_token_stride, head, line < GROUP, HEAD_DIM, BLOCK_DIM)
    is_query = (position < high)[:, None] & is_feature[None, :]
    token = (first + position - start).to(tl.int64)
    query_at = token[:, None] * q_token_stride + head[:, None] * q_head_stride + feature[None, :]
    q = tl.load(q_ptr + query_at, mask=is_query, other=0.0)

    in_exponents = index * KV_HEADS + kv_head
    in_page = in_exponents[:, None] * HEAD_DIM + feature[None, :]
    whole = None if HEAD_DIM == BLOCK_DIM else is_feature[None, :]
    first_position = tl.load(page_first + row)
    cell_pages_ptr = page_list + tl.load(page_bounds + row) - first_position // CELL
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, BLOCK_DIM], tl.float32)

    # [begin, inner) lies partly outside some query's window   [inner, own_cell) is seen by all   own_cell: causal
    lowest = tl.maximum(first_position, low - WINDOW + 1) if WINDOW else first_position
    begin, end = lowest // CELL, own_cell
    if SHARES > 1:
        # This program's cells are [begin, end), and own_cell if that comes next and it is the last program.
        span = tl.maximum(tl.cdiv(own_cell + 1 - begin, SHARES), LEAST_CELLS)
        shares = tl.cdiv(own_cell + 1 - begin, span)
        share = tl.program_id(2)
        if share >= shares:
            return
        begin += share * span
        end = tl.minimum(own_cell, begin + span)
    inner = begin
    # A page's number is loaded one cell ahead, so that only keys and values are left for the stages.
    page = tl.load(cell_pages_ptr + begin)
    if WINDOW:
        inner = tl.minimum(tl.cdiv(tl.maximum(high - WINDOW, 0), CELL), end)
        inner = tl.maximum(inner, begin)
        for cell in tl.range(begin, inner):
            page_at = page.to(tl.int64) * page_stride
            exponents_at = page.to(tl.int64) * exponent_stride + in_exponents
            page = tl.load(cell_pages_ptr + cell + 1)
            key_position = cell * CELL + index
            peak, total, mixed = _mix_cell(
                q, peak, total, mixed, key_pages + page_at + in_page, value_pages + page_at + in_page,
                key_exponents, value_exponents, exponents_at, (key_position >= lowest)[:, None] & is_feature[None, :],
                key_position >= lowest, key_position[None, :] > position[:, None] - WINDOW,
                scale, SOFTCAP, False, PRECISION,
            )  # fmt: skip
    for cell in tl.range(inner, end):
        page_at = page.to(tl.int64) * page_stride
        exponents_at = page.to(tl.int64) * exponent_stride + in_exponents
        page = tl.load(cell_pages_ptr + cell + 1)
        peak, total, mixed = _mix_cell(
            q, peak, total, mixed, key_pages + page_at + in_page, value_pages + page_at + in_page,
            key_exponents, value_exponents, exponents_at, whole, None, None, scale, SOFTCAP, True, PRECISION,
        )  # fmt: skip
    page_at = page.to(tl.int64) * page_stride
    exponents_at = page.to(tl.int64) * exponent_stride + in_exponents
    key_position = own_cell * CELL + index
    there = (key_position >= lowest) & (key_position < high)
    if SHARES > 1:
        there &= share == shares - 1
    visible = there[None, :] & (key_position[None, :] <= position[:, None])
    if WINDOW:
        visible &= key_position[None, :] > position[:, None] - WINDOW
    peak, total, mixed = _mix_cell(
        q, peak, total, mixed, key_pages + page_at + in_page, value_pages + page_at + in_page,
        key_exponents, value_exponents, exponents_at, there[:, None] & is_feature[None, :], there, visible,
        scale, SOFTCAP, False, PRECISION,
    )  # fmt: skip

    if SHARES > 1:
        block = number * KV_HEADS + kv_head
        blocks = tl.num_programs(0).to(tl.int64) * KV_HEADS
        parts_ptr += block.to(tl.int64) * (SHARES * BLOCK * BLOCK_DIM)
        sums_ptr = parts_ptr + (blocks - block) * (SHARES * BLOCK * BLOCK_DIM) + block * (SHARES * BLOCK)
        at = share * BLOCK + line
        # A query may see nothing of a share.
        found = mixed * tl.where(total > 0, 1 / total, 0.0)[:, None]
        tl.store(parts_ptr + at[:, None] * BLOCK_DIM + feature[None, :], found)
        tl.store(sums_ptr + at, peak + tl.log2(total))
        # All threads must store before the counter signals the others.
        tl.debug_barrier()
        if tl.atomic_add(come_ptr + block, 1, sem="acq_rel") < shares - 1:
            return
        tl.store(come_ptr + block, 0)
        peak, total, mixed = _merge_shares(parts_ptr, sums_ptr, shares, BLOCK, BLOCK_DIM)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - peak)
    out_at = token[:, None] * out_token_stride + head[:, None] * HEAD_DIM + feature[None, :]
    tl.store(out_ptr + out_at, (mixed * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)
