"""Paged attention, row by row: write new keys and values to their pages, then read everything back.

Attention is causal by position in the sequence, with an optional sliding window, grouped heads, softcap and sinks.
Memory that a row cannot see may hold anything, NaN included: it is never gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import AttentionForm, AttentionInputs
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed
from weft.kernels.pages import put, take
from weft.kernels.plain.activation import gated_product
from weft.kernels.plain.norm import rms_norm
from weft.kernels.plain.rotary import rotate
from weft.kernels.plain.rows import Row, rows_of_step


def attend(
    inputs: AttentionInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    form = inputs.form
    heads = inputs.projected.unflatten(-1, (-1, form.head_dim))
    turning = form.heads + form.kv_heads
    queries_keys, values = heads[:, :turning], heads[:, turning : turning + form.kv_heads]
    if inputs.norm is not None:
        queries_keys = rms_norm(queries_keys, inputs.norm, form.norm_eps)
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
    y = torch.empty_like(q)
    for number, row in enumerate(rows_of_step(batch)):
        pages = pages_of(batch, number, view.window)
        for position in range(row.start, row.end):
            place, token = (pages[position // batch.cell], position % batch.cell), row.packed(position)
            put(view, place, k[token], v[token])
        y[row.tokens] = attend_row(q[row.tokens], row, pages, view, scale, softcap, sinks)
    return y


def pages_of(batch: Batch, row: int, window: int | None) -> dict[int, int]:
    """Return the page of each cell that a row can reach."""
    assert batch.host is not None
    plan = batch.host.plan
    if window is None:
        return dict(enumerate(plan.page_table[row].tolist()))
    return dict(enumerate(plan.window_table[row].tolist(), int(plan.window_first[row])))


def attend_row(
    q: Float[Tensor, "n heads head_dim"],
    row: Row,
    pages: dict[int, int],
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "n heads head_dim"]:
    cell, share = view.keys.shape[1], q.shape[1] // view.keys.shape[2]
    low = 0 if view.window is None else max(0, row.start - view.window + 1)
    cells = range(low // cell, (row.end - 1) // cell + 1)
    listed = torch.tensor([pages[number] for number in cells], device=q.device)
    wide = q.float()
    keys, values = (
        part.flatten(0, 1)[low % cell :][: row.end - low].repeat_interleave(share, 1)
        for part in take(view, listed, wide.dtype)
    )
    scores = torch.einsum("qhd,khd->hqk", wide, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query = torch.arange(row.start, row.end, device=q.device).unsqueeze(1)
    key = torch.arange(low, row.end, device=q.device)
    seen = key <= query
    if view.window is not None:
        seen &= key > query - view.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        # A sink adds to the denominator and contributes no value.
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
