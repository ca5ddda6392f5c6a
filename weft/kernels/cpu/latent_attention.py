"""Latent attention by absorption: queries go to the latent space and outputs come back, so pages are read as they are.

With the expansion absorbed into the query, a latent page is the keys of one head that all query heads read, and its
values too. The features of the shared key take part in the sum of values, and are dropped from the result.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import LatentInputs, LatentWeights
from weft.kernels.cpu.attention import attention
from weft.kernels.cpu.linear import wide
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed


def attend_latents(
    inputs: LatentInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    queries, latents, weights, scale = inputs.queries, inputs.latents, inputs.weights, inputs.scale
    stored = torch.cat([latents, inputs.shared], -1).unsqueeze(1)
    weights = LatentWeights(wide(weights.keys), wide(weights.values))
    pages = AttentionView(view.keys, view.keys, view.window)
    mixed = attention(weights.absorb(wide(queries)), stored, stored, batch, pages, scale)
    return placed(weights.expand(mixed[..., : latents.shape[1]]).flatten(1).to(queries.dtype), out)
