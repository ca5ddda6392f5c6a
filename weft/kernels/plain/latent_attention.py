"""Latent attention, row by row: write latents to their pages, read them back, expand every head's keys and values.

A page holds a token's latent and the key that all heads share, side by side. Attention is causal by position in the
sequence. Memory that a row cannot see may hold anything, NaN included: it is never gathered.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import LatentInputs, LatentWeights
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed
from weft.kernels.plain.attention import pages_of
from weft.kernels.plain.rows import Row, rows_of_step


def attend_latents(
    inputs: LatentInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    queries, latents, weights, scale = inputs.queries, inputs.latents, inputs.weights, inputs.scale
    stored = torch.cat([latents, inputs.shared], -1)
    mixed = queries.new_empty(*queries.shape[:2], weights.values.shape[1])
    for number, row in enumerate(rows_of_step(batch)):
        pages = pages_of(batch, number, view.window)
        for position in range(row.start, row.end):
            view.keys[pages[position // batch.cell], position % batch.cell, 0] = stored[row.packed(position)]
        cells = range((row.end - 1) // batch.cell + 1)
        seen = torch.cat([view.keys[pages[cell], :, 0] for cell in cells])[: row.end].float()
        mixed[row.tokens] = attend_row(queries[row.tokens].float(), seen, row, weights, scale).to(mixed.dtype)
    return placed(mixed.flatten(1), out)


def attend_row(
    queries: Float[Tensor, "n heads query_dim"],
    seen: Float[Tensor, "positions width"],
    row: Row,
    weights: LatentWeights,
    scale: float,
) -> Float[Tensor, "n heads value_dim"]:
    heads, _, latent = weights.keys.shape
    own = torch.einsum("pl,hkl->phk", seen[:, :latent], weights.keys.float())
    keys = torch.cat([own, seen[:, None, latent:].expand(-1, heads, -1)], -1)
    values = torch.einsum("pl,hvl->phv", seen[:, :latent], weights.values.float())
    scores = torch.einsum("qhd,phd->hqp", queries, keys) * scale
    query = torch.arange(row.start, row.end, device=queries.device).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(row.end, device=queries.device) > query, -torch.inf)
    return torch.einsum("hqp,phv->qhv", scores.softmax(-1), values)
