"""Multi-head latent attention (MLA) without positions: all heads' keys and values come from one latent per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.device.store import AttentionView, View
from weft.kernels.attention import LatentInputs, LatentWeights
from weft.kernels.interface import Batch, Operations
from weft.kernels.rotary import Rotation
from weft.memory.spec import AttentionMemory, Memory
from weft.models.layers.attention import DTYPE_NAMES
from weft.models.layers.linear import OutputLinear, PackedLinear
from weft.models.layers.norm import RMSNorm
from weft.models.model import ProjectedMixer, Source, sources
from weft.models.sharding import RankCut, Shard, current_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of a latent attention layer, and the rank whose heads are computed. Every rank has all latents."""

    hidden: int
    heads: int
    latent: int
    key_dim: int  # features of a key that are expanded from the latent
    shared_dim: int  # features of a key that all heads share
    value_dim: int
    norm_eps: float  # of the latent's norm
    dtype: torch.dtype
    shard: Shard = field(default_factory=current_shard)

    @property
    def head_cut(self) -> RankCut:
        return self.shard.cut(self.heads, "attention heads")

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.shared_dim

    @property
    def stored(self) -> int:
        """Return the numbers that a page holds of a token."""
        return self.latent + self.shared_dim


class LatentAttention(ProjectedMixer):
    """Latent attention layer. Checkpoint names: q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj."""

    projections = ("queries_latents", "o_proj")

    def __init__(self, shape: LatentShape) -> None:
        super().__init__()
        self.shape = shape
        self.expanded_cut = shape.head_cut.times(shape.key_dim + shape.value_dim)
        parts: dict[str, int | RankCut] = {
            "q_proj": shape.head_cut.times(shape.query_dim),
            "kv_a_proj_with_mqa": shape.stored,
        }
        self.queries_latents = PackedLinear(shape.hidden, parts)
        self.sizes = [shape.head_cut.kept * shape.query_dim, shape.latent, shape.shared_dim]
        self.kv_a_layernorm = RMSNorm(shape.latent, shape.norm_eps)
        # The checkpoint's kv_b_proj by head: the rows of its keys, then those of its values.
        self.expansion = nn.Parameter(
            torch.empty(shape.head_cut.kept, shape.key_dim + shape.value_dim, shape.latent), requires_grad=False
        )
        self.o_proj = OutputLinear(shape.head_cut.times(shape.value_dim), shape.hidden)

    def memory(self, operations: Operations) -> Memory:
        shape = self.shape
        return AttentionMemory(1, shape.stored, DTYPE_NAMES[shape.dtype], latent=shape.latent)

    def keep_pages_in(self, dtype: str) -> None:
        raise ModelError(f"kv_dtype: latents of this model's attention cannot be kept in {dtype}; leave it out")

    def mix(
        self,
        projected: Float[Tensor, "tokens projected"],
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
        out: Float[Tensor, "tokens inner"] | None = None,
    ) -> Float[Tensor, "tokens inner"]:
        shape, view = self.shape, views[self.index]
        assert isinstance(view, AttentionView)
        assert rotation is None, "this layer has no positions"
        queries, latents, shared = projected.split_with_sizes(self.sizes, -1)
        latents = self.kv_a_layernorm(latents, batch)
        weights = LatentWeights(*self.expansion.split_with_sizes([shape.key_dim, shape.value_dim], 1))
        queries, scale = queries.unflatten(-1, (-1, shape.query_dim)), shape.query_dim**-0.5
        inputs = LatentInputs(queries, latents, shared, weights, scale)
        return batch.operations.attend_latents(inputs, batch, view, out)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield Source(prefix + "kv_b_proj.weight", self.expansion.flatten(0, 1), cut=self.expanded_cut)
        for name, child in self.named_children():
            yield from sources(child, f"{prefix}{name}.")
