"""Paged attention for rows of one token, each cut into shares by its own position alone.

A row that sees many cells is cut into up to MOST shares of equal size, from the first cell that it sees. Programs take
runs of adjacent shares, from all rows in turn: which program computes a share, and what it computes before, does not
change its bits. With few rows a run is one share; with many a program reads on without a pause from one share to the
next. A row of one share is finished there; a second kernel merges the others, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.cuda.attention.decode import AT_ONCE, LAUNCHES, LOG2_E, PLAIN_LAUNCH, multiprocessors_of
from weft.kernels.cuda.attention.pages import powers_at
from weft.kernels.cuda.launch.arguments import STEP, cache_of, pages_of, rows_of
from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.interface import Batch


class RowSharing(NamedTuple):
    """Maximum number of shares of a row, and minimum number of cells of each."""

    most: int
    least_cells: int


# Cells of a share: a program reads fewer faster than a second kernel could merge them.
LEAST_CELLS = 2
# Cells of the longest run.
RUN_CELLS = 16
# Shares of a row, for all of a layer's key heads together, that keep a large GPU's memory busy.
SHARES = 128


def sharing_of(kv_heads: int) -> RowSharing:
    """Return the sharing of a layer. It knows nothing of a step.

    >>> sharing_of(8), sharing_of(2)
    (RowSharing(most=16, least_cells=2), RowSharing(most=32, least_cells=2))
    """
    return RowSharing(min(32, max(8, power_of_two(SHARES // kv_heads))), LEAST_CELLS)


def run_of(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the number of cells up to which a program takes several shares of a row.

    If all rows had RUN_CELLS cells, there would be at least as many runs as run at the same time.

    >>> run_of(1, 8, 132), run_of(32, 4, 132), run_of(32, 8, 132), run_of(128, 4, 132)
    (1, 4, 8, 16)
    """
    run = 1
    while run < RUN_CELLS and rows * kv_heads * RUN_CELLS >= 2 * run * multiprocessors * AT_ONCE:
        run *= 2
    return run


def programs_of(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the number of programs per key head. With many rows they are more than run at the same time.

    Which program computes a share changes no bit of it.
    """
    return max(rows, multiprocessors * AT_ONCE // kv_heads)


def attend_decodes(
    q: Tensor,
    out: Tensor,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    sharing: RowSharing | None = None,
) -> None:
    """Attend for the leading `batch.decodes` tokens of `q` [tokens, heads, head_dim] into those of `out`."""
    rows, heads, head_dim = batch.decodes, q.shape[1], q.shape[2]
    _, cell, kv_heads, _ = view.keys.shape
    block_dim = max(16, power_of_two(head_dim))
    most, least_cells = sharing or sharing_of(kv_heads)
    launch = LAUNCHES.get(block_dim * q.element_size(), PLAIN_LAUNCH)
    # The results of all shares, then the logarithms of the sums that they were divided by.
    parts = torch.empty(rows * heads * most * (head_dim + 1), dtype=torch.float32, device=q.device)
    found = named(
        out_ptr=out, out_token_stride=out.stride(0), parts_ptr=parts, sinks_ptr=out if sinks is None else sinks,
        rows=rows,
    )  # fmt: skip
    common = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "CELL": cell,
        "WINDOW": view.window or 0,
        "MOST": most,
        "LEAST_CELLS": least_cells,
        "HAS_SINKS": sinks is not None,
        **early(q),
    }
    multiprocessors = multiprocessors_of(q.device)
    programs, run = (choose(rows, kv_heads, multiprocessors) for choose in (programs_of, run_of))
    _attend_shares[(kv_heads, programs)](
        named(q_ptr=q, q_token_stride=q.stride(0), q_head_stride=q.stride(1), scale=scale, run=run), found,
        cache_of(view), pages_of(batch, view), rows_of(batch),
        BLOCK_HEADS=max(16, power_of_two(heads // kv_heads)), KEYS=min(launch.keys, cell),
        SOFTCAP=softcap or 0.0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **common, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    _merge_shares[(heads, rows)](
        found, rows_of(batch), **common, num_warps=1 if block_dim < 256 else 2,
    )  # fmt: skip


@triton.jit
def _cut(position, CELL: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr, LEAST_CELLS: tl.constexpr):
    """Return a row's first cell, the cells of a share, and the number of shares, from its position alone."""
    first = tl.maximum(position - WINDOW + 1, 0) // CELL if WINDOW else position * 0
    cells = position // CELL + 1 - first
    size = tl.maximum(tl.cdiv(cells, MOST), LEAST_CELLS)
    return first, size, tl.cdiv(cells, size)


@triton.jit
def _find(
    number, run, row_start, rows,
    CELL: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr, LEAST_CELLS: tl.constexpr,
):  # fmt: skip
    """Return the row of a run, counted through all rows; the number of runs before that row, and of all rows.

    If there is no such run, the row is `rows`.
    """
    BLOCK: tl.constexpr = 256
    row = 0
    before = 0
    done = 0
    for begin in range(0, rows, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        start = tl.load(row_start + index, mask=index < rows, other=0)
        _, size, count = _cut(start, CELL, WINDOW, MOST, LEAST_CELLS)
        count = tl.where(index < rows, tl.cdiv(count, _shares_of_run(run, size)), 0)
        ends = done + tl.cumsum(count, 0)
        passed = (ends <= number) & (index < rows)
        row += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        done += tl.sum(count, 0)
    return row, before, done


@triton.jit
def _shares_of_run(run, size):
    return tl.maximum(run // size, 1)


@jit(**STEP)
def _attend_shares(
    q_ptr, q_token_stride, q_head_stride, scale, run,
    out_ptr, out_token_stride, parts_ptr, sinks_ptr, rows,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
    positions, write_page, page_first, page_bounds, page_list,
    row_start, row_first, row_slot, row_tail, row_closing,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CELL: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, MOST: tl.constexpr, LEAST_CELLS: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute some runs, for the heads of one group."""
    kv_head, number = tl.program_id(0), tl.program_id(1)
    row, before, runs = _find(number, run, row_start, rows, CELL, WINDOW, MOST, LEAST_CELLS)
    # A step's rows and pages are older than the previous kernel.
    position, share, first_cell, size, count, cell_pages, first_page = _place(
        row, number - before, run, rows, row_start, page_first, page_bounds, page_list,
        CELL, WINDOW, MOST, LEAST_CELLS,
    )  # fmt: skip
    wait(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, BLOCK_HEADS)
    head = kv_head * GROUP + member
    feature = tl.arange(0, BLOCK_DIM)
    is_query = (member < GROUP)[:, None] & (feature < HEAD_DIM)[None, :]
    while number < runs:
        query_at = tl.cast(row, tl.int64) * q_token_stride + head[:, None] * q_head_stride + feature[None, :]
        q = tl.load(q_ptr + query_at, mask=is_query, other=0.0)
        _mix_run(
            q, row, rows, share, count, first_cell, size, run, position, scale, kv_head,
            out_ptr, out_token_stride, parts_ptr, sinks_ptr,
            key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
            cell_pages, first_page,
            HEADS, KV_HEADS, BLOCK_HEADS, HEAD_DIM, BLOCK_DIM, CELL, KEYS, WINDOW, MOST, SOFTCAP, HAS_SINKS, PRECISION,
        )  # fmt: skip
        number += tl.num_programs(1)
        if number < runs:
            row, before, _ = _find(number, run, row_start, rows, CELL, WINDOW, MOST, LEAST_CELLS)
            position, share, first_cell, size, count, cell_pages, first_page = _place(
                row, number - before, run, rows, row_start, page_first, page_bounds, page_list,
                CELL, WINDOW, MOST, LEAST_CELLS,
            )  # fmt: skip


@triton.jit
def _place(
    row, number, run, rows, row_start, page_first, page_bounds, page_list,
    CELL: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr, LEAST_CELLS: tl.constexpr,
):  # fmt: skip
    """Return a row's position, a run's first share, its first cell, the size and number of the row's shares, and pages.

    A row beyond the last is taken for the last: there is nothing to compute, but the loads must be of a step's memory.
    """
    row = tl.minimum(row, rows - 1)
    position = tl.load(row_start + row)
    first_cell, size, count = _cut(position, CELL, WINDOW, MOST, LEAST_CELLS)
    cell_pages = page_list + tl.load(page_bounds + row) - tl.load(page_first + row) // CELL
    share = tl.minimum(number * _shares_of_run(run, size), count - 1)
    first_cell += share * size
    return position, share, first_cell, size, count, cell_pages, tl.load(cell_pages + first_cell)


@triton.jit
def _mix_run(
    q, row, rows, share, count, first_cell, size, run, position, scale, kv_head,
    out_ptr, out_token_stride, parts_ptr, sinks_ptr,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride, cell_pages, first_page,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, CELL: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the shares of a run, from `share` on: the running softmax over the visible cells of each.

    `cell_pages` points to the page of cell 0, and `first_page` is the page of the run's first cell.
    """
    BLOCKS: tl.constexpr = CELL // KEYS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    member, feature, index = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM), tl.arange(0, KEYS)
    head = kv_head * GROUP + member
    is_result = (member < GROUP)[:, None] & (feature < HEAD_DIM)[None, :]
    in_page = (index[:, None] * KV_HEADS + kv_head) * HEAD_DIM + feature[None, :]
    low = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    first_block = tl.maximum(first_cell * BLOCKS, low // KEYS)
    last_block = tl.minimum((first_cell + size * _shares_of_run(run, size)) * BLOCKS - 1, position // KEYS)
    share_end = tl.minimum((first_cell + size) * BLOCKS - 1, last_block)
    peak = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    mixed = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    # A page's number is loaded one block ahead, so that only keys and values are left for the stages.
    next_page = first_page
    for block in tl.range(first_block, last_block + 1):
        block_at = next_page.to(tl.int64) * page_stride + block % BLOCKS * (KEYS * KV_HEADS * HEAD_DIM)
        powers = next_page.to(tl.int64) * exponent_stride + (block % BLOCKS * KEYS + index) * KV_HEADS + kv_head
        next_page = tl.load(cell_pages + tl.minimum(block + 1, last_block) // BLOCKS)
        key_position = block * KEYS + index
        seen = key_position <= position
        if WINDOW:
            seen &= key_position >= low
        # Memory that is not seen may hold NaN, so it is not even loaded.
        loaded = seen[:, None] & (feature < HEAD_DIM)[None, :]
        keys = tl.load(key_pages + block_at + in_page, mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if key_exponents is not None:
            scores *= powers_at(key_exponents, powers, seen)[None, :]
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)
        scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
        # Every block has a visible key, so the maximum is finite.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fading = tl.exp2(peak - new_peak)
        total = total * fading + tl.sum(weights, 1)
        if value_exponents is not None:
            weights *= powers_at(value_exponents, powers, seen)[None, :]
        values = tl.load(value_pages + block_at + in_page, mask=loaded, other=0.0).to(q.dtype)
        mixed = tl.dot(weights.to(values.dtype), values, acc=mixed * fading[:, None], input_precision=PRECISION)
        peak = new_peak
        if block == share_end:
            if count == 1:
                whole = total
                if HAS_SINKS:
                    sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
                    whole += tl.exp2(sink * LOG2_E - peak)
                out_at = tl.cast(row, tl.int64) * out_token_stride + head[:, None] * HEAD_DIM + feature[None, :]
                found = (mixed * (1 / whole)[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + out_at, found, mask=is_result)
            else:
                which = (tl.cast(row, tl.int64) * HEADS + head) * MOST + share
                sums = tl.cast(rows, tl.int64) * (HEADS * MOST * HEAD_DIM)
                part_at = which[:, None] * HEAD_DIM + feature[None, :]
                tl.store(parts_ptr + part_at, mixed * (1 / total)[:, None], mask=is_result)
                tl.store(parts_ptr + sums + which, peak + tl.log2(total), mask=member < GROUP)
            # The next share begins anew.
            share += 1
            share_end = tl.minimum(share_end + size * BLOCKS, last_block)
            peak = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_HEADS], tl.float32)
            mixed = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)


@jit(**STEP)
def _merge_shares(
    out_ptr, out_token_stride, parts_ptr, sinks_ptr, rows,
    row_start, row_first, row_slot, row_tail, row_closing,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    CELL: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr, LEAST_CELLS: tl.constexpr,
    HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one head of one row, each weighted by the sum that it was divided by."""
    head, row = tl.program_id(0), tl.program_id(1)
    _, _, count = _cut(tl.load(row_start + row), CELL, WINDOW, MOST, LEAST_CELLS)
    # Wait even if there is nothing to merge: kernels that wait for this one rely on the one before it too.
    wait(EARLY)
    if count == 1:
        return
    share, feature = tl.arange(0, MOST), tl.arange(0, BLOCK_DIM)
    is_feature = feature < HEAD_DIM
    first = (row.to(tl.int64) * HEADS + head) * MOST
    parts_at = (first + share)[:, None] * HEAD_DIM + feature[None, :]
    parts = tl.load(parts_ptr + parts_at, mask=(share < count)[:, None] & is_feature[None, :], other=0.0)
    sums_at = tl.cast(rows, tl.int64) * (HEADS * MOST * HEAD_DIM) + first + share
    sums = tl.load(parts_ptr + sums_at, mask=share < count, other=float("-inf"))
    peak = tl.max(sums, 0)
    if HAS_SINKS:
        # A sink is a share of its own, without values.
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(sums - peak)
    mixed = tl.sum(weights[:, None] * parts, 0)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    out_at = row.to(tl.int64) * out_token_stride + head * HEAD_DIM + feature
    tl.store(out_ptr + out_at, (mixed / total).to(out_ptr.dtype.element_ty), mask=is_feature)
