"""Paged attention for rows of one token, in Triton: the cells of all rows, cut into equal shares.

The list of pages is one line of cells, row behind row. A fixed number of programs per head divide it evenly among
them, wherever rows begin and end, so all finish together whether the rows are many, few, long or of very different
lengths. Who reads what is found on the device, so a recorded graph may be replayed with other rows. A row that lies
within one share is finished there; the parts of another are merged, always in the same order, by whichever of its
programs comes last. Writes no pages.
"""

from __future__ import annotations

from functools import cache
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
SHARING = ("rows", "shares", "least_cells")


class Launch(NamedTuple):
    keys: int  # of one cell that are loaded at once
    warps: int
    stages: int
    programs: int  # on one multiprocessor

    @property
    def registers(self) -> int:
        """Of a thread, at the most: so few that all programs find room."""
        return min(65536 // (32 * self.warps * self.programs) // 8 * 8, 255)


# By bytes of a head's key, padded to a power of two.
LAUNCHES = {128: Launch(64, 4, 3, 4), 256: Launch(64, 4, 3, 3), 512: Launch(32, 4, 3, 3)}
# What is left over: float32 heads too large for several stages in shared memory, and tests' small ones.
PLAIN_LAUNCH = Launch(64, 4, 1, 2)

# Of a share: below this, merging takes longer than reading.
LEAST_CELLS = 4


class Sharing(NamedTuple):
    """Into how many shares the line of cells is cut at the most, and how many cells a share has at the least."""

    shares: int
    least_cells: int


def share_out(multiprocessors: int, programs: int, kv_heads: int) -> Sharing:
    """As many shares as can be read side by side.

    >>> share_out(multiprocessors=132, programs=3, kv_heads=8)
    Sharing(shares=49, least_cells=4)
    """
    return Sharing(max(1, multiprocessors * programs // kv_heads), LEAST_CELLS)


@cache
def multiprocessors_of(device: torch.device) -> int:
    """Of the processor that runs the interpreter: as if it had a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


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
    group = triton.next_power_of_2(heads // kv_heads)
    block_dim = max(16, triton.next_power_of_2(head_dim))
    launch = launch or LAUNCHES.get(block_dim * q.element_size(), PLAIN_LAUNCH)
    sharing = sharing or share_out(multiprocessors_of(q.device), launch.programs, kv_heads)
    # Of every share: the part of a row that begins before it, and the part of one that ends behind it; then their sums.
    parts = torch.empty(sharing.shares * 2 * heads * (head_dim + 1), dtype=torch.float32, device=q.device)
    _attend_share[(kv_heads, sharing.shares)](
        q, view.keys, view.values, out, parts, _counters(q.device, triton.next_power_of_2(rows * kv_heads)),
        out if sinks is None else sinks,
        lanes.start, listed.first_position, listed.bounds, listed.pages, rows, *sharing,
        q.stride(0), q.stride(1), view.keys.stride(0), scale,
        HEADS=heads, KV_HEADS=kv_heads, LINES=group, BLOCK_HEADS=max(16, group),
        HEAD_DIM=head_dim, BLOCK_DIM=block_dim, CELL=cell, KEYS=min(launch.keys, cell),
        WINDOW=view.window or 0, SOFTCAP=softcap or 0.0, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **early(q), num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers,
    )  # fmt: skip


@cache
def _counters(device: torch.device, size: int) -> Tensor:
    """How many parts of a row are there, by head: zero before and after every step."""
    return torch.zeros(size, dtype=torch.int32, device=device)


@triton.jit
def _rows_of(first_cell, last_cell, bounds_ptr, rows):
    """The rows that two cells of the line belong to: as many rows as end at a cell or before."""
    BLOCK: tl.constexpr = 256
    first_row, last_row = 0, 0
    for base in range(0, rows, BLOCK):
        number = base + tl.arange(0, BLOCK)
        ends = tl.load(bounds_ptr + 1 + number, mask=number < rows, other=2147483647)
        first_row += tl.sum((ends <= first_cell).to(tl.int32), 0)
        last_row += tl.sum((ends <= last_cell).to(tl.int32), 0)
    return first_row, last_row


@triton.jit
def _find_row(
    row, share_begin, share_end, start_ptr, first_position_ptr, bounds_ptr, pages_ptr,
    CELL: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What a share has of a row: its cells on the line, and blocks of keys from the first that is seen to the last."""
    row_begin, row_end = tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    position, first_position = tl.load(start_ptr + row), tl.load(first_position_ptr + row)
    low = tl.maximum(first_position, position - WINDOW + 1) if WINDOW else first_position
    # From cells of the row to cells of the line.
    origin = row_begin - first_position // CELL
    begin, end = tl.maximum(share_begin, row_begin), tl.minimum(share_end, row_end)
    first = tl.maximum((begin - origin) * (CELL // KEYS), low // KEYS)
    last = tl.minimum((end - origin) * (CELL // KEYS) - 1, position // KEYS)
    page = tl.load(pages_ptr + origin + tl.minimum(first, last) // (CELL // KEYS))
    return row_begin, row_end, position, low, origin, first, last, page


@triton.jit(do_not_specialize=SHARING, do_not_specialize_on_alignment=LANES)
def _attend_share(
    q_ptr, keys_ptr, values_ptr, out_ptr, parts_ptr, counters_ptr, sinks_ptr,
    start_ptr, first_position_ptr, bounds_ptr, pages_ptr, rows, shares, least_cells,
    q_token_stride, q_head_stride, page_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, LINES: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CELL: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One share of the line, for the heads of one group: row by row."""
    kv_head, share = tl.program_id(0), tl.program_id(1)
    cells = tl.load(bounds_ptr + rows)
    size = tl.maximum(tl.cdiv(cells, shares), least_cells)
    share_begin, share_end = share * size, tl.minimum((share + 1) * size, cells)
    first_row, last_row = _rows_of(share_begin, share_end - 1, bounds_ptr, rows)
    # All of this is older than the queries: no need to wait for it. A program without a share looks at the last row.
    next_row_begin, next_row_end, next_position, next_low, next_origin, next_first, next_last, next_page = _find_row(
        tl.minimum(first_row, rows - 1), share_begin, share_end,
        start_ptr, first_position_ptr, bounds_ptr, pages_ptr, CELL, KEYS, WINDOW,
    )  # fmt: skip
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
    query_at = head[:, None] * q_head_stride + feature[None, :]
    index = tl.arange(0, KEYS)
    in_page = (index[:, None] * KV_HEADS + kv_head) * HEAD_DIM + feature[None, :]
    next_q = tl.load(q_ptr + tl.cast(first_row, tl.int64) * q_token_stride + query_at, mask=is_query, other=0.0)
    for row in range(first_row, last_row + 1):
        row_begin, row_end, position, low, origin = next_row_begin, next_row_end, next_position, next_low, next_origin
        first_block, last_block, page, q = next_first, next_last, next_page, next_q
        # What the next row begins with is on its way while this one is read.
        following = tl.minimum(row + 1, last_row)
        next_row_begin, next_row_end, next_position, next_low, next_origin, next_first, next_last, next_page = (
            _find_row(following, share_begin, share_end, start_ptr, first_position_ptr, bounds_ptr, pages_ptr,
                      CELL, KEYS, WINDOW)
        )  # fmt: skip
        next_q = tl.load(q_ptr + tl.cast(following, tl.int64) * q_token_stride + query_at, mask=is_query, other=0.0)
        peak = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        mixed = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
        for block in tl.range(first_block, last_block + 1):
            block_at = page.to(tl.int64) * page_stride + block % BLOCKS * (KEYS * KV_HEADS * HEAD_DIM)
            # A page's number is loaded one block ahead, so that only keys and values are left for the stages.
            page = tl.load(pages_ptr + origin + tl.minimum(block + 1, last_block) // BLOCKS)
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

        begins, ends = row_begin >= share_begin, row_end <= share_end
        if begins & ends:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
                total += tl.exp2(sink * LOG2_E - peak)
            out_at = (tl.cast(row, tl.int64) * HEADS + head)[:, None] * HEAD_DIM + feature[None, :]
            tl.store(out_ptr + out_at, (mixed * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)
        else:
            which = ((kv_head * shares + share) * 2 + begins.to(tl.int32)) * GROUP + member
            # Cells of a list that no query sees any more leave nothing to divide.
            inverse = tl.where(total > 0, 1 / total, 0.0)
            part_at = which[:, None] * HEAD_DIM + feature[None, :]
            tl.store(parts_ptr + part_at, mixed * inverse[:, None], mask=is_query)
            tl.store(parts_ptr + shares * (2 * HEADS * HEAD_DIM) + which, peak + tl.log2(total), mask=member < GROUP)
            first_share, last_share = row_begin // size, (row_end - 1) // size
            counter_ptr = counters_ptr + kv_head * rows + row
            # All of this program's part is written before it is counted.
            tl.debug_barrier()
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == last_share - first_share:
                tl.store(counter_ptr, 0)
                _merge_parts(
                    parts_ptr, out_ptr, sinks_ptr, row, kv_head, first_share, last_share, shares,
                    HEADS, GROUP, LINES, HEAD_DIM, BLOCK_DIM, HAS_SINKS,
                )  # fmt: skip


@triton.jit
def _merge_parts(
    parts_ptr, out_ptr, sinks_ptr, row, kv_head, first_share, last_share, shares,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The parts of a row, each weighed by the sum that it was divided by."""
    BLOCK: tl.constexpr = 8
    member = tl.arange(0, LINES)
    feature = tl.arange(0, BLOCK_DIM)
    is_out = (member < GROUP)[:, None] & (feature < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    # A sink is a part of its own, without values.
    peak = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros([LINES, BLOCK_DIM], tl.float32)
    for first in range(first_share, last_share + 1, BLOCK):
        share = first + tl.arange(0, BLOCK)
        is_part = (share <= last_share)[:, None] & (member < GROUP)[None, :]
        begins = (share == first_share).to(tl.int32)
        which = ((kv_head * shares + share) * 2 + begins)[:, None] * GROUP + member[None, :]
        part_at = which[:, :, None] * HEAD_DIM + feature[None, None, :]
        # Other programs wrote these, so they must not come from a cache of this multiprocessor's own.
        parts = tl.load(
            parts_ptr + part_at,
            mask=is_part[:, :, None] & (feature < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        sums_ptr = parts_ptr + shares * (2 * HEADS * HEAD_DIM) + which
        sums = tl.load(sums_ptr, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(sums, 0))
        # Where nothing was seen yet: any finite number does.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(sums - reference[None, :])
        fading = tl.exp2(peak - reference)
        mixed = mixed * fading[:, None] + tl.sum(weights[:, :, None] * parts, 0)
        total = total * fading + tl.sum(weights, 0)
        peak = new_peak
    out_at = (tl.cast(row, tl.int64) * HEADS + head)[:, None] * HEAD_DIM + feature[None, :]
    tl.store(out_ptr + out_at, (mixed * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)
