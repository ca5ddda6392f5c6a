"""Paged attention: write new keys and values to their pages, then read everything back through the page table.

Attention is causal by global position, with an optional sliding window, grouped heads, softcap and sinks. Memory
that a row cannot see may hold anything, NaN included: it is cut off or zeroed, never multiplied by a zero weight.
`paged_reads.py` plans the reads once per step; this module executes them once per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import AttentionForm, AttentionInputs
from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.index_building import indices
from weft.kernels.cpu.linear import wide
from weft.kernels.cpu.norm import rms_norm_heads
from weft.kernels.cpu.paged_reads import PaddedRead, Read, RowRead, SharedRead, plan_reads
from weft.kernels.cpu.rotary import rotate
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed
from weft.kernels.pages import put, take

# Values and, if needed, the logarithm of the sum that they were divided by, [tokens, heads].
Mixed = tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"] | None]


def attend(
    inputs: AttentionInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    form = inputs.form
    heads = inputs.projected.unflatten(-1, (-1, form.head_dim))
    turning = form.heads + form.kv_heads
    queries_keys, values = heads[:, :turning], heads[:, turning : turning + form.kv_heads]
    if inputs.norm is not None:
        queries_keys = rms_norm_heads(queries_keys, inputs.norm, form.norm_eps)
    if inputs.rotation is not None:
        queries_keys = rotate(queries_keys, inputs.rotation)
    queries, keys = queries_keys[:, : form.heads], queries_keys[:, form.heads :]
    mixed = attention(queries, keys, values, batch, view, form.scale, form.softcap, inputs.sinks).flatten(-2)
    if not form.gated:
        return placed(mixed, out)
    return gated_product(heads[:, turning + form.kv_heads :].flatten(-2), mixed, torch.sigmoid, out)


def warm_attention(forms: Sequence[AttentionForm], dtype: torch.dtype) -> None:
    """Do nothing: there is nothing to compile."""


def prefix_members(form: AttentionForm, dtype: torch.dtype) -> int:
    """Return 1: rows are computed on their own."""
    return 1


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
    """Attend with queries and keys that are already normed and rotated."""
    assert batch.host is not None
    paging = indices(batch).paging(view.window)
    put(view, (paging.write_page, paging.write_offset) if paging.lone is None else paging.lone, k, v)
    reads = batch.derived.get(("attention", view.window))
    if reads is None:
        reads = plan_reads(batch.host.rows, paging, view.window, view.keys.shape[1])
        batch.derived["attention", view.window] = reads
    queries = wide(q)
    if len(reads) == 1:
        return _with_sinks(_mix(queries, view, reads[0], scale, softcap, sinks is not None), sinks).to(q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype)
    for read in reads:
        out[read.tokens] = _with_sinks(_mix(queries, view, read, scale, softcap, sinks is not None), sinks)
    return out


def _with_sinks(mixed: Mixed, sinks: Tensor | None) -> Tensor:
    values, total = mixed
    if sinks is None:
        return values
    assert total is not None
    return values * torch.sigmoid(total - sinks.float()).to(values.dtype).unsqueeze(-1)


def _mix(q: Tensor, view: AttentionView, read: Read, scale: float, softcap: float | None, with_total: bool) -> Mixed:
    match read:
        case RowRead():
            return _mix_row(q[read.tokens], view, read, scale, softcap, with_total)
        case PaddedRead():
            return _mix_padded(q[read.tokens], view, read, scale, softcap, with_total)
        case SharedRead():
            return _mix_shared(q, view, read, scale, softcap)


def _mix_row(
    q: Tensor, view: AttentionView, read: RowRead, scale: float, softcap: float | None, with_total: bool
) -> Mixed:
    """Attend for one row. Heads of a group have their own dimension, over which keys broadcast without a copy."""
    count, heads, head_dim = q.shape
    kv_heads = view.keys.shape[2]
    group = heads // kv_heads
    keys, values = (
        part.flatten(0, 1)[read.low : read.high].transpose(0, 1).unsqueeze(1)
        for part in take(view, read.pages, q.dtype)
    )
    if count == 1:
        # With a single query, the heads take the place of queries.
        queries = q.view(kv_heads, 1, group, head_dim)
        mixed, total = _softmax_mix(queries, keys, values, None, False, scale, softcap, with_total)
        return mixed.reshape(1, heads, head_dim), None if total is None else total.reshape(1, heads)
    queries = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    keys, values = keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1)
    mixed, total = _softmax_mix(queries, keys, values, read.mask, read.causal, scale, softcap, with_total)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2), None if total is None else total.permute(2, 0, 1).flatten(1)


def _mix_padded(
    q: Tensor, view: AttentionView, read: PaddedRead, scale: float, softcap: float | None, with_total: bool
) -> Mixed:
    """Attend for rows of one query each, in one padded pass."""
    rows, kv_heads = q.shape[0], view.keys.shape[2]

    def of_rows(pages: Tensor) -> Tensor:
        tokens = pages.flatten(0, 1).index_fill_(0, read.unseen, 0)
        by_row: Tensor = tokens.unflatten(0, (rows, -1))
        return by_row.transpose(1, 2)

    queries, (keys, values) = q.unflatten(1, (kv_heads, -1)), map(of_rows, take(view, read.pages, q.dtype))
    mixed, total = _softmax_mix(queries, keys, values, read.mask, False, scale, softcap, with_total)
    return mixed.flatten(1, 2), None if total is None else total.flatten(1)


def _mix_shared(q: Tensor, view: AttentionView, read: SharedRead, scale: float, softcap: float | None) -> Mixed:
    """Read the common prefix once for all rows, and merge each row's own remainder with it by their log-sums."""
    kv_heads = view.keys.shape[2]
    mine = q[read.tokens]
    rows, _, head_dim = mine.shape
    keys, values = (part.flatten(0, 1).transpose(0, 1).unsqueeze(0) for part in take(view, read.pages, q.dtype))
    queries = mine.unflatten(1, (kv_heads, -1)).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    common, common_total = _softmax_mix(queries, keys, values, None, False, scale, softcap, True)
    assert common_total is not None
    common = common.view(kv_heads, rows, -1, head_dim).transpose(0, 1).flatten(1, 2)
    common_total = common_total.view(kv_heads, rows, -1).transpose(0, 1).flatten(1)
    parts = [_mix(q, view, own, scale, softcap, True) for own in read.own]
    own = torch.cat([values for values, _ in parts]) if len(parts) > 1 else parts[0][0]
    totals = [total for _, total in parts if total is not None]
    own_total = torch.cat(totals) if len(totals) > 1 else totals[0]
    share = torch.sigmoid(common_total - own_total).to(q.dtype).unsqueeze(-1)
    return torch.lerp(own, common, share), torch.logaddexp(common_total, own_total)


def _softmax_mix(
    q: Float[Tensor, "a b queries head_dim"],
    k: Float[Tensor, "a b keys head_dim"],
    v: Float[Tensor, "a b keys head_dim"],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    with_total: bool,
) -> tuple[Float[Tensor, "a b queries head_dim"], Float[Tensor, "a b queries"] | None]:
    if softcap is None and not with_total:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale), None
    bias = None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    if softcap is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, log_sum = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return mixed, log_sum
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        scores += torch.full(scores.shape[-2:], float("-inf")).triu(1)
    if bias is not None:
        scores += bias
    total = scores.logsumexp(-1)
    return torch.matmul((scores - total.unsqueeze(-1)).exp().to(v.dtype), v), total
