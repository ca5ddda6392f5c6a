"""Paged attention for rows of one token, in Triton: the cells of all rows, cut into equal shares.

The list of pages is one line of cells, row behind row. A fixed number of programs per head divide it evenly among
them, wherever rows begin and end, so all finish together whether the rows are many, few, long or of very different
lengths. Who reads what is found on the device, so a recorded graph may be replayed with other rows. A row that lies
within one share is finished there; the parts of the others are merged by the program that comes last, always in the
same order. Pages are not written.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.launching import jit, power_of_two
from weft.kernels.cuda.overlap import early, wait
from weft.kernels.lanes import Lanes, PageList
from weft.memory.device.store import AttentionView

LOG2_E = tl.constexpr(1.4426950408889634)
# Parts of one upload: where each begins differs from step to step, and must not be compiled in.
LANES = ("start_ptr", "first_position_ptr", "bounds_ptr", "pages_ptr")
SHARING = ("rows", "shares", "least_cells")


class Launch(NamedTuple):
    keys: int  # of one cell that are loaded at once
    warps: int
    stages: int


# By bytes of a head's key, padded to a power of two.
LAUNCHES = {128: Launch(64, 4, 3), 256: Launch(64, 4, 3), 512: Launch(32, 4, 3)}
# What is left over: float32 heads too large for several stages in shared memory, and tests' small ones.
PLAIN_LAUNCH = Launch(64, 4, 1)
# So many of these programs find room on one multiprocessor.
AT_ONCE = 3
# Numbers that are merged at a time.
MERGED = 8192
# More rows times heads of keys than a step has.
COUNTERS = 1 << 16


class Sharing(NamedTuple):
    """Into how many shares the line of cells is cut at the most, and how many cells a share has at the least."""

    shares: int
    least_cells: int


def share_out(multiprocessors: int, kv_heads: int) -> Sharing:
    """As many shares as can be read side by side.

    >>> share_out(multiprocessors=132, kv_heads=8)
    Sharing(shares=49, least_cells=1)
    """
    return Sharing(max(1, multiprocessors * AT_ONCE // kv_heads), 1)


@cache
def multiprocessors_of(device: torch.device) -> int:
    """The interpreter works as if it had a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


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
    block_dim = max(16, power_of_two(head_dim))
    sharing = sharing or share_out(multiprocessors_of(q.device), kv_heads)
    launch = launch or LAUNCHES.get(block_dim * q.element_size(), PLAIN_LAUNCH)
    # Of every share: the part of a row that begins before it, and the part of one that ends behind it; then their sums.
    parts = torch.empty(sharing.shares * 2 * heads * (head_dim + 1), dtype=torch.float32, device=q.device)
    members = power_of_two(heads // kv_heads)
    assert rows * kv_heads <= COUNTERS, f"{rows} rows at once"
    _attend_share[(kv_heads, sharing.shares)](
        q, view.keys, view.values, out, parts, counters(q.device), out if sinks is None else sinks,
        lanes.start, listed.first_position, listed.bounds, listed.pages, rows, *sharing,
        q.stride(0), q.stride(1), view.keys.stride(0), scale,
        HEADS=heads, KV_HEADS=kv_heads, MEMBERS=members, BLOCK_HEADS=max(16, members), HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim, CELL=cell, KEYS=min(launch.keys, cell), MERGED=max(1, MERGED // (members * block_dim)),
        WINDOW=view.window or 0, SOFTCAP=softcap or 0.0, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=launch.warps, num_stages=launch.stages, **early(q),
    )  # fmt: skip


@cache
def counters(device: torch.device) -> Tensor:
    """How many parts of a row have come, for each group of heads. Every call leaves zeros behind."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _rows_of(first_cell, last_cell, bounds_ptr, rows):
    """The rows that two cells of the line belong to: as many rows as end at a cell or before."""
    BLOCK: tl.constexpr = 256
    first_row, last_row = 0, 0
    for first in range(0, rows, BLOCK):
        number = first + tl.arange(0, BLOCK)
        ends = tl.load(bounds_ptr + 1 + number, mask=number < rows, other=2147483647)
        first_row += tl.sum((ends <= first_cell).to(tl.int32), 0)
        last_row += tl.sum((ends <= last_cell).to(tl.int32), 0)
    return first_row, last_row


@triton.jit
def _merge_parts(
    parts_ptr, out_ptr, sinks_ptr, kv_head, row, first_share, last_share, shares,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MERGED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """A row's heads of one group: their parts, each weighed by the sum that it was divided by."""
    member = tl.arange(0, MEMBERS)
    feature = tl.arange(0, BLOCK_DIM)
    is_member, is_feature = member < GROUP, feature < HEAD_DIM
    # A sink is a part of its own, without values.
    peak = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + kv_head * GROUP + member, mask=is_member, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros([MEMBERS, BLOCK_DIM], tl.float32)
    for first in range(first_share, last_share + 1, MERGED):
        share = first + tl.arange(0, MERGED)
        real = (share <= last_share)[:, None] & is_member[None, :]
        begins = (share == first_share).to(tl.int32)
        which = ((kv_head * shares + share) * 2 + begins)[:, None] * GROUP + member[None, :]
        # Others have written them: not what this multiprocessor may remember.
        sums_at = parts_ptr + shares * (2 * HEADS * HEAD_DIM) + which
        sums = tl.load(sums_at, mask=real, other=float("-inf"), cache_modifier=".cg")
        part_at = parts_ptr + which[:, :, None] * HEAD_DIM + feature[None, None, :]
        parts = tl.load(part_at, mask=real[:, :, None] & is_feature[None, None, :], other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(sums, 0))
        # Where nothing was seen yet: any finite number does.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(sums - reference[None, :])
        fading = tl.exp2(peak - reference)
        mixed = mixed * fading[:, None] + tl.sum(weights[:, :, None] * parts, 0)
        total = total * fading + tl.sum(weights, 0)
        peak = new_peak
    out_at = (tl.cast(row, tl.int64) * HEADS + kv_head * GROUP + member)[:, None] * HEAD_DIM + feature[None, :]
    result = (mixed / tl.where(is_member, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, result, mask=is_member[:, None] & is_feature[None, :])


@jit(do_not_specialize=SHARING, do_not_specialize_on_alignment=LANES)
def _attend_share(
    q_ptr, keys_ptr, values_ptr, out_ptr, parts_ptr, come_ptr, sinks_ptr,
    start_ptr, first_position_ptr, bounds_ptr, pages_ptr, rows, shares, least_cells,
    q_token_stride, q_head_stride, page_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CELL: tl.constexpr, KEYS: tl.constexpr, MERGED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One share of the line, for the heads of one group: row by row."""
    kv_head, share = tl.program_id(0), tl.program_id(1)
    cells = tl.load(bounds_ptr + rows)
    size = tl.maximum(tl.cdiv(cells, shares), least_cells)
    share_begin = share * size
    share_end = tl.minimum(share_begin + size, cells)
    first_row, last_row = _rows_of(share_begin, share_end - 1, bounds_ptr, rows)
    wait(EARLY)
    if share_begin >= share_end:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = CELL // KEYS
    member = tl.arange(0, BLOCK_HEADS)
    head = kv_head * GROUP + member
    feature = tl.arange(0, BLOCK_DIM)
    is_feature = feature < HEAD_DIM
    is_query = (member < GROUP)[:, None] & is_feature[None, :]
    index = tl.arange(0, KEYS)
    in_page = (index[:, None] * KV_HEADS + kv_head) * HEAD_DIM + feature[None, :]
    for row in range(first_row, last_row + 1):
        row_begin, row_end = tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
        position, first_position = tl.load(start_ptr + row), tl.load(first_position_ptr + row)
        low = tl.maximum(first_position, position - WINDOW + 1) if WINDOW else first_position
        query_at = tl.cast(row, tl.int64) * q_token_stride + head[:, None] * q_head_stride + feature[None, :]
        q = tl.load(q_ptr + query_at, mask=is_query, other=0.0)
        # Cells of the line to positions of the row, and back.
        origin = row_begin - first_position // CELL
        begin, end = tl.maximum(share_begin, row_begin), tl.minimum(share_end, row_end)
        first_block = tl.maximum((begin - origin) * BLOCKS, low // KEYS)
        last_block = tl.minimum((end - origin) * BLOCKS - 1, position // KEYS)
        peak = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        mixed = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
        # A page's number is loaded one block ahead, so that only keys and values are left for the stages.
        next_page = tl.load(pages_ptr + origin + tl.minimum(first_block, last_block) // BLOCKS)
        for block in tl.range(first_block, last_block + 1):
            block_at = next_page.to(tl.int64) * page_stride + block % BLOCKS * (KEYS * KV_HEADS * HEAD_DIM)
            next_page = tl.load(pages_ptr + origin + tl.minimum(block + 1, last_block) // BLOCKS)
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

        if (begin == row_begin) & (end == row_end):
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
                total += tl.exp2(sink * LOG2_E - peak)
            out_at = (tl.cast(row, tl.int64) * HEADS + head)[:, None] * HEAD_DIM + feature[None, :]
            tl.store(out_ptr + out_at, (mixed * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)
        else:
            which = ((kv_head * shares + share) * 2 + (begin == row_begin).to(tl.int32)) * GROUP + member
            # Cells of a list that no query sees any more leave nothing to divide.
            inverse = tl.where(total > 0, 1 / total, 0.0)
            part_at = which[:, None] * HEAD_DIM + feature[None, :]
            tl.store(parts_ptr + part_at, mixed * inverse[:, None], mask=is_query)
            tl.store(parts_ptr + shares * (2 * HEADS * HEAD_DIM) + which, peak + tl.log2(total), mask=member < GROUP)
            # All threads have stored before the count tells the others.
            tl.debug_barrier()
            come = come_ptr + row * KV_HEADS + kv_head
            first_share, last_share = row_begin // size, (row_end - 1) // size
            if tl.atomic_add(come, 1, sem="acq_rel") == last_share - first_share:
                _merge_parts(
                    parts_ptr, out_ptr, sinks_ptr, kv_head, row, first_share, last_share, shares,
                    HEADS, GROUP, MEMBERS, HEAD_DIM, BLOCK_DIM, MERGED, HAS_SINKS,
                )  # fmt: skip
                tl.store(come, 0)
