"""Paged attention for rows of one token, in Triton: every row's cells are shared out among a fixed number of programs.

How many programs work on a row follows from how many rows there may be, never from their lengths, so a recorded graph
may be replayed with others: each program finds its share from the row's position, and one without a share ends at once.
A second kernel merges the shares of rows that have several, always in the same order. Neither writes pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.overlap import early, wait
from weft.kernels.lanes import Lanes, PageList
from weft.memory.device.store import AttentionView

LOG2_E = tl.constexpr(1.4426950408889634)
# Parts of one upload: where each begins differs from step to step, and must not be compiled in.
LANES = ("start_ptr", "first_position_ptr", "bounds_ptr", "pages_ptr")
SHARING = ("shares", "least_cells")

# Programs that run side by side on a GPU of about 130 multiprocessors: few rows are cut so that all start at once.
AT_ONCE = 396
# Shares of a row where many rows make more programs than that: short ones, so that none is left over at the end.
USUAL_SHARES = 16


class Launch(NamedTuple):
    keys: int  # of one cell that are loaded at once
    warps: int
    stages: int


# By bytes of a head's key, padded to a power of two.
LAUNCHES = {128: Launch(64, 4, 4), 256: Launch(64, 4, 3), 512: Launch(32, 4, 3)}
# What is left over: float32 heads too large for several stages in shared memory, and tests' small ones.
PLAIN_LAUNCH = Launch(64, 4, 1)


class Sharing(NamedTuple):
    """Into how many shares a row's cells are cut at the most, and how many cells a share has at the least."""

    shares: int
    least_cells: int


def share_out(rows: int, kv_heads: int, window: int | None, cell: int) -> Sharing:
    """
    >>> share_out(1, 8, None, 64), share_out(64, 8, None, 64), share_out(256, 8, 128, 64)
    (Sharing(shares=49, least_cells=2), Sharing(shares=16, least_cells=4), Sharing(shares=1, least_cells=4))
    """
    shares = max(AT_ONCE // (rows * kv_heads), USUAL_SHARES)
    least_cells = 2 if rows * kv_heads <= AT_ONCE // 4 else 4
    if window is not None:
        shares = min(shares, triton.cdiv(window // cell + 2, least_cells))
    return Sharing(shares, least_cells)


def attend_decodes(
    q: Tensor,
    out: Tensor,
    lanes: Lanes,
    listed: PageList,
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    sharing: Sharing | None = None,
    launch: Launch | None = None,
) -> None:
    """The leading `lanes.decodes` tokens of `q` [tokens, heads, head_dim] into those of `out`."""
    rows, heads, head_dim = lanes.decodes, q.shape[1], q.shape[2]
    _, cell, kv_heads, _ = view.keys.shape
    block_dim = max(16, triton.next_power_of_2(head_dim))
    sharing = sharing or share_out(rows, kv_heads, view.window, cell)
    launch = launch or LAUNCHES.get(block_dim * q.element_size(), PLAIN_LAUNCH)
    shares = sharing.shares
    # Where shares wait for the merge. A row's only share goes straight to `out`.
    parts = torch.empty((rows, heads, shares, head_dim), dtype=torch.float32, device=q.device)
    totals = torch.empty((rows, heads, shares), dtype=torch.float32, device=q.device)
    common = {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "CELL": cell,
        "WINDOW": view.window or 0,
        "HAS_SINKS": sinks is not None,
        **early(q),
    }
    _attend_share[(kv_heads, rows, shares)](
        q, view.keys, view.values, out, parts, totals, out if sinks is None else sinks,
        lanes.start, listed.first_position, listed.bounds, listed.pages,
        q.stride(0), q.stride(1), view.keys.stride(0), scale, *sharing,
        KV_HEADS=kv_heads, BLOCK_HEADS=max(16, triton.next_power_of_2(heads // kv_heads)),
        KEYS=min(launch.keys, cell), SOFTCAP=softcap or 0.0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **common, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if shares > 1:
        _merge_shares[(heads, rows)](
            parts, totals, out, out if sinks is None else sinks, lanes.start, listed.first_position, *sharing,
            **common, num_warps=1 if block_dim < 256 else 2,
        )  # fmt: skip


@triton.jit
def _find_share(position, first_position, share, shares, least_cells, CELL: tl.constexpr, WINDOW: tl.constexpr):
    """The first visible position of a row, its number of cells, how many of them a share has, and this one's bounds."""
    low = tl.maximum(first_position, position - WINDOW + 1) if WINDOW else first_position
    first_cell = low // CELL
    cells = position // CELL + 1 - first_cell
    size = tl.maximum(tl.cdiv(cells, shares), least_cells)
    begin = first_cell + share * size
    return low, cells, size, begin, tl.minimum(begin + size, first_cell + cells)


@triton.jit(do_not_specialize=SHARING, do_not_specialize_on_alignment=LANES)
def _attend_share(
    q_ptr, keys_ptr, values_ptr, out_ptr, parts_ptr, totals_ptr, sinks_ptr,
    start_ptr, first_position_ptr, bounds_ptr, pages_ptr,
    q_token_stride, q_head_stride, page_stride, scale, shares, least_cells,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CELL: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The heads of one group of one row over one share of its cells."""
    kv_head, row, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(start_ptr + row)
    first_position = tl.load(first_position_ptr + row)
    low, cells, size, begin, end = _find_share(position, first_position, share, shares, least_cells, CELL, WINDOW)
    cell_pages_ptr = pages_ptr + tl.load(bounds_ptr + row) - first_position // CELL
    wait(EARLY)
    if begin >= end:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, BLOCK_HEADS)
    head = kv_head * GROUP + member
    feature = tl.arange(0, BLOCK_DIM)
    is_feature = feature < HEAD_DIM
    is_query = (member < GROUP)[:, None] & is_feature[None, :]
    query_at = row.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + feature[None, :]
    q = tl.load(q_ptr + query_at, mask=is_query, other=0.0)

    index = tl.arange(0, KEYS)
    in_page = (index[:, None] * KV_HEADS + kv_head) * HEAD_DIM + feature[None, :]
    peak = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    mixed = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    BLOCKS: tl.constexpr = CELL // KEYS
    # A page's number is loaded one block ahead, so that only keys and values are left for the stages.
    next_page = tl.load(cell_pages_ptr + begin)
    for block in tl.range(tl.maximum(begin * BLOCKS, low // KEYS), tl.minimum(end * BLOCKS, position // KEYS + 1)):
        block_at = next_page.to(tl.int64) * page_stride + block % BLOCKS * (KEYS * KV_HEADS * HEAD_DIM)
        next_page = tl.load(cell_pages_ptr + tl.minimum((block + 1) // BLOCKS, end - 1))
        key_position = block * KEYS + index
        seen = key_position <= position
        if WINDOW:
            seen &= key_position >= low
        # What is not seen may be NaN, so it is not even loaded.
        loaded = seen[:, None] & is_feature[None, :]
        keys = tl.load(keys_ptr + block_at + in_page, mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)
        scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
        # Every block has a key that is seen, so the peak is finite.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fading = tl.exp2(peak - new_peak)
        total = total * fading + tl.sum(weights, 1)
        values = tl.load(values_ptr + block_at + in_page, mask=loaded, other=0.0)
        mixed = tl.dot(weights.to(values.dtype), values, acc=mixed * fading[:, None], input_precision=PRECISION)
        peak = new_peak

    row_head = row * HEADS + head
    if size >= cells:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
            total += tl.exp2(sink * LOG2_E - peak)
        out_at = row_head.to(tl.int64)[:, None] * HEAD_DIM + feature[None, :]
        tl.store(out_ptr + out_at, (mixed * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)
    else:
        part = row_head.to(tl.int64) * shares + share
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + feature[None, :], mixed * (1 / total)[:, None], mask=is_query)
        tl.store(totals_ptr + part, peak + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=SHARING, do_not_specialize_on_alignment=LANES)
def _merge_shares(
    parts_ptr, totals_ptr, out_ptr, sinks_ptr, start_ptr, first_position_ptr, shares, least_cells,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CELL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row: its shares weighed by the sums that they were divided by."""
    head, row = tl.program_id(0), tl.program_id(1)
    position, first_position = tl.load(start_ptr + row), tl.load(first_position_ptr + row)
    _, cells, size, _, _ = _find_share(position, first_position, 0, shares, least_cells, CELL, WINDOW)
    # Also where nothing is to be merged: whoever waits for this kernel relies on the one before it too.
    wait(EARLY)
    if size >= cells:
        return
    used = tl.cdiv(cells, size)
    row_head = (row * HEADS + head).to(tl.int64)
    feature = tl.arange(0, BLOCK_DIM)
    is_feature = feature < HEAD_DIM
    # A sink is a share of its own, without values.
    peak = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E if HAS_SINKS else tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 1.0 if HAS_SINKS else 0.0, tl.float32)
    mixed = tl.zeros([BLOCK_DIM], tl.float32)
    BLOCK_SHARES: tl.constexpr = 16
    for first in range(0, used, BLOCK_SHARES):
        share = first + tl.arange(0, BLOCK_SHARES)
        sums = tl.load(totals_ptr + row_head * shares + share, mask=share < used, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(sums, 0))
        weights = tl.exp2(sums - new_peak)
        fading = tl.exp2(peak - new_peak)
        part_at = (row_head * shares + share)[:, None] * HEAD_DIM + feature[None, :]
        parts = tl.load(parts_ptr + part_at, mask=(share < used)[:, None] & is_feature[None, :], other=0.0)
        mixed = mixed * fading + tl.sum(weights[:, None] * parts, 0)
        total = total * fading + tl.sum(weights, 0)
        peak = new_peak
    out_at = row_head * HEAD_DIM + feature
    tl.store(out_ptr + out_at, (mixed / total).to(out_ptr.dtype.element_ty), mask=is_feature)
