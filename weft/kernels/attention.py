"""Paged attention: new keys and values go to their pages first, then everything is read back through the table.

Causal by global position, with an optional sliding window, grouped heads, softcap and sinks. What a row cannot see may
hold anything, NaN included: it is cut off or zeroed, never multiplied by a zero weight. What depends on the step alone
(pages to read, masks) is made by the first layer that asks and kept in `batch.derived`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch, Paging
from weft.memory.device.store import AttentionView

# Queries of one row that are scored at once: bounds the mask to this times the keys they can see.
QUERY_BLOCK = 512
# Decodes that see at most so many tokens each are read in one padded pass, longer ones row by row.
PADDED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Read:
    """Queries [first, last) of the pack and the keys that they see together: those of `pages`, cut to [low, high)."""

    first: int
    last: int
    pages: Tensor  # [pages]
    low: int
    high: int
    causal: bool  # no mask is needed: query i sees keys 0 .. i
    mask: Tensor | None  # [queries, keys] bool, None where every query sees every key


@dataclass(frozen=True, slots=True)
class PaddedRead:
    """The leading `rows` of one query each, padded to equally many pages."""

    rows: int
    pages: Tensor  # [rows * pages]
    unseen: Tensor  # [unseen] indices into the rows * tokens that were read
    mask: Tensor  # [rows, 1, 1, tokens] bool


def attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    paging = batch.full if view.window is None else batch.windowed
    assert paging is not None
    view.keys[paging.write_page, paging.write_offset] = k
    view.values[paging.write_page, paging.write_offset] = v
    reads = batch.derived.get(("attention", view.window))
    if reads is None:
        reads = plan_reads(batch, paging, view.window, view.keys.shape[1])
        batch.derived["attention", view.window] = reads
    parts = [
        _attend_padded(q, view, read, scale, softcap, sinks)
        if isinstance(read, PaddedRead)
        else _attend(q, view, read, scale, softcap, sinks)
        for read in reads
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_reads(batch: Batch, paging: Paging, window: int | None, cell: int) -> list[Read | PaddedRead]:
    """Who reads which pages in this step, in the order of the pack."""
    reads: list[Read | PaddedRead] = []
    singles = batch.decode_rows
    seen = [end - _low(end - 1, window) for end in batch.host_end[:singles]]
    if singles > 1 and max(seen) <= PADDED_TOKENS:
        reads.append(_padded_read(batch, paging, window, cell))
    else:
        singles = 0
    for row in range(singles, batch.rows):
        start, end, first = batch.host_start[row], batch.host_end[row], batch.host_first[row]
        for low in range(start, end, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, end)
            reads.append(_read(batch, paging, row, first + low - start, low, high, window, cell))
    return reads


def _low(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _read(
    batch: Batch, paging: Paging, row: int, first: int, start: int, end: int, window: int | None, cell: int
) -> Read:
    """Queries at positions [start, end) of a row."""
    lowest = _low(start, window)
    device = paging.table.device
    cells = torch.arange(lowest // cell, (end - 1) // cell + 1, device=device)
    pages = paging.table[row].index_select(0, cells - paging.first_position[row] // cell)
    base = lowest // cell * cell
    causal, mask = False, None
    if end - start > 1:
        causal = start == 0 and (window is None or window >= end)
        if not causal:
            query = torch.arange(start, end, device=device).unsqueeze(1)
            key = torch.arange(lowest, end, device=device)
            mask = key <= query
            if window is not None:
                mask &= key > query - window
    return Read(first, first + end - start, pages, lowest - base, end - base, causal, mask)


def _padded_read(batch: Batch, paging: Paging, window: int | None, cell: int) -> PaddedRead:
    rows, device = batch.decode_rows, paging.table.device
    lows = [_low(end - 1, window) for end in batch.host_end[:rows]]
    width = max((end - 1) // cell - low // cell + 1 for low, end in zip(lows, batch.host_end))
    low = torch.tensor(lows, device=device).unsqueeze(1)
    first_cell = low // cell
    columns = first_cell - paging.first_position[:rows].unsqueeze(1) // cell + torch.arange(width, device=device)
    pages = paging.table[:rows].gather(1, columns.clamp(max=paging.table.shape[1] - 1))
    key = first_cell * cell + torch.arange(width * cell, device=device)
    seen = (key >= low) & (key < batch.end[:rows].unsqueeze(1))
    # How many are unseen is known on the host, so this is not a wait for the device.
    unseen_count = sum(width * cell - (end - low) for low, end in zip(lows, batch.host_end))
    unseen = torch.argsort(seen.flatten().byte(), stable=True)[:unseen_count]
    return PaddedRead(rows, pages.flatten(), unseen, seen[:, None, None, :])


def _attend(
    q: Tensor, view: AttentionView, read: Read, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One row: heads of a group are a dimension of their own, over which keys are shared without a copy."""
    kv_heads, head_dim = view.keys.shape[2:]
    group = q.shape[1] // kv_heads
    keys, values = (
        pages.index_select(0, read.pages).flatten(0, 1)[read.low : read.high].transpose(0, 1).unsqueeze(1)
        for pages in (view.keys, view.values)
    )
    count = read.last - read.first
    queries = q[read.first : read.last]
    if count == 1:
        # A lone query: its heads take the place of queries.
        queries = queries.view(kv_heads, 1, group, head_dim)
        sinks = None if sinks is None else sinks.view(kv_heads, 1, group, 1)
    else:
        queries = queries.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
        keys, values = keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1)
        sinks = None if sinks is None else sinks.view(kv_heads, group, 1, 1)
    mixed = _softmax_mix(queries, keys, values, read.mask, read.causal, scale, softcap, sinks)
    if count == 1:
        return mixed.view(1, -1, head_dim)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_padded(
    q: Tensor, view: AttentionView, read: PaddedRead, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    kv_heads = view.keys.shape[2]

    def gather(pages: Tensor) -> Tensor:
        tokens = pages.index_select(0, read.pages).flatten(0, 1).index_fill_(0, read.unseen, 0)
        return tokens.unflatten(0, (read.rows, -1)).transpose(1, 2)

    queries = q[: read.rows].unflatten(1, (kv_heads, -1))
    sinks = None if sinks is None else sinks.view(1, kv_heads, -1, 1)
    mixed = _softmax_mix(queries, gather(view.keys), gather(view.values), read.mask, False, scale, softcap, sinks)
    return mixed.flatten(1, 2)


def _softmax_mix(
    q: Float[Tensor, "a b queries head_dim"],
    k: Float[Tensor, "a b keys head_dim"],
    v: Float[Tensor, "a b keys head_dim"],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Float[Tensor, "a b queries head_dim"]:
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return torch.matmul(scores.softmax(-1).to(v.dtype), v)
    # A sink takes part in the sum of the softmax and brings no value.
    weights = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v)
