"""Constants and inputs of attention layers, shared by all backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.rotary import Rotation


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Constants of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    norm_eps: float = 0.0  # of the query and key norms, if the layer has them
    gated: bool = False  # gates follow the values in the projection; their sigmoid multiplies the output


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What an attention layer computes with.

    `projected` holds queries, keys, values and, if the layer is gated, gates, side by side. `norm` holds the weights of
    the query norms, then of the key norms, one line per head. A sink adds to its head's softmax denominator and
    contributes no value.
    """

    projected: Float[Tensor, "tokens projected"]
    form: AttentionForm
    norm: Float[Tensor, "normed head_dim"] | None = None
    sinks: Float[Tensor, " heads"] | None = None
    rotation: Rotation | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Expansion of a token's latent to the keys and values of every head. Both may be slices of one tensor."""

    keys: Float[Tensor, "heads key_dim latent"]
    values: Float[Tensor, "heads value_dim latent"]

    def absorb(self, queries: Float[Tensor, "tokens heads query_dim"]) -> Float[Tensor, "tokens heads width"]:
        """Return queries of the latents themselves: q (W latent) = (q W) latent. The shared part stays as it is."""
        key_dim = self.keys.shape[1]
        own = torch.bmm(queries[..., :key_dim].transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat([own, queries[..., key_dim:]], -1)

    def expand(self, mixed: Float[Tensor, "tokens heads latent"]) -> Float[Tensor, "tokens heads value_dim"]:
        """Return every head's values of a sum of latents."""
        return torch.bmm(mixed.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class LatentInputs:
    """What a layer of latent attention computes with.

    A head's key is the expansion of the latent by `weights`, then the shared key; its query has the same two parts.
    """

    queries: Float[Tensor, "tokens heads query_dim"]
    latents: Float[Tensor, "tokens latent"]
    shared: Float[Tensor, "tokens shared_dim"]
    weights: LatentWeights
    scale: float
