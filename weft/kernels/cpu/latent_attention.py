"""Latent attention by absorption: queries go to the latent space and outputs come back, so pages are read as they are.

With the expansion absorbed into the query, a latent page is the keys of one head that all query heads read, and its
values too. The features of the shared key take part in the sum of values, and are dropped from the result.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import LatentWeights
from weft.kernels.cpu.attention import attention
from weft.kernels.cpu.linear import wide
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed


def attend_latents(
    queries: Float[Tensor, "tokens heads query_dim"],
    latents: Float[Tensor, "tokens latent"],
    shared: Float[Tensor, "tokens shared_dim"],
    weights: LatentWeights,
    scale: float,
    batch: Batch,
    view: AttentionView,
    out: Float[Tensor, "tokens inner"] | None = None,
) -> Float[Tensor, "tokens inner"]:
    stored = torch.cat([latents, shared], -1).unsqueeze(1)
    weights = LatentWeights(wide(weights.keys), wide(weights.values))
    pages = AttentionView(view.keys, view.keys, view.window)
    mixed = attention(weights.absorb(wide(queries)), stored, stored, batch, pages, scale)
    return placed(weights.expand(mixed[..., : latents.shape[1]]).flatten(1).to(queries.dtype), out)
