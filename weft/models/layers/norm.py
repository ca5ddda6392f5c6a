"""Norms as layers: they hold the weights, operations compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.interface import Batch
from weft.kernels.outputs import placed
from weft.models.layers.linear import parent_of
from weft.models.model import Layer, Source
from weft.models.sharding import RankCut, current_shard


def one_plus(stored: Tensor) -> Tensor:
    return stored.float() + 1.0


class RMSNorm(Layer):
    """RMS norm. Zero-centred weights (Gemma, Qwen3-Next) are kept as 1 + w, in float32 to preserve a small w."""

    def __init__(self, size: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = zero_centred
        dtype = torch.float32 if zero_centred else None
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Float[Tensor, "*n size"], batch: Batch) -> Float[Tensor, "*n size"]:
        return batch.operations.rms_norm(x, self.weight, self.eps)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield Source(prefix + "weight", self.weight, one_plus if self.zero_centred else None)


class QueryKeyNorm(Layer):
    """Weights of the query and key norms, head by head: attention applies both in one pass.

    It is a sibling of `q_norm` and `k_norm` in the checkpoint, which have `head_dim` weights each.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, zero_centred: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.zero_centred = zero_centred
        dtype = torch.float32 if zero_centred else None
        self.weight = nn.Parameter(torch.empty(heads + kv_heads, head_dim, dtype=dtype), requires_grad=False)

    def initialise(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        siblings = parent_of(prefix)
        transform = one_plus if self.zero_centred else None
        shape = (self.weight.shape[1],)
        yield Source(f"{siblings}q_norm.weight", self.weight[: self.heads], transform, shape)
        yield Source(f"{siblings}k_norm.weight", self.weight[self.heads :], transform, shape)


class AcrossHeadsNorm(Layer):
    """Norms of queries and keys, each over all its heads together; checkpoint names as of `QueryKeyNorm`."""

    def __init__(self, queries: RankCut, keys: RankCut, eps: float) -> None:
        super().__init__()
        self.cuts, self.eps = (queries, keys), eps
        self.sizes = [queries.kept, keys.kept]
        self.ranks = current_shard().ranks
        self.weight = nn.Parameter(torch.empty(sum(self.sizes)), requires_grad=False)

    def forward(self, projected: Float[Tensor, "tokens projected"], batch: Batch) -> Float[Tensor, "tokens projected"]:
        """Norm the queries and keys at the start of `projected`."""
        queries, keys = self.sizes
        parts = projected.split_with_sizes([queries, keys, projected.shape[1] - queries - keys], -1)
        weights = self.weight.split(self.sizes)
        normed = (self.norm(part.contiguous(), weight, batch) for part, weight in zip(parts, weights))
        return torch.cat([*normed, parts[2]], -1)

    def norm(self, x: Float[Tensor, "tokens size"], weight: Float[Tensor, " size"], batch: Batch) -> Tensor:
        if self.ranks == 1:
            return batch.operations.rms_norm(x, weight, self.eps)
        squares = batch.operations.add_ranks(mean_square(x)) / self.ranks
        return (x.float() * (squares + self.eps).rsqrt() * weight).to(x.dtype)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        for name, weight, cut in zip(("q_norm", "k_norm"), self.weight.split(self.sizes), self.cuts):
            yield Source(f"{parent_of(prefix)}{name}.weight", weight, cut=cut)


def mean_square(x: Float[Tensor, "*n size"]) -> Float[Tensor, "*n 1"]:
    return x.float().square().mean(-1, keepdim=True)


class GatedRMSNorm(Layer):
    """Norm after a recurrent mixer: norm(x) * silu(gate), or norm(x * silu(gate)) if the gate comes first."""

    def __init__(self, size: int, eps: float, groups: int = 1, gate_first: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.gate_first = gate_first
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(
        self,
        x: Float[Tensor, "*n size"],
        gate: Float[Tensor, "*n size"],
        batch: Batch,
        out: Float[Tensor, "*n size"] | None = None,
    ) -> Float[Tensor, "*n size"]:
        """Return the gated norm. `out`, if given, is filled and returned; its rows need not be adjacent."""
        norm = batch.operations.gated_rms_norm
        return norm(x, gate, self.weight, self.eps, self.groups, self.gate_first, out)


class InnerNorm(GatedRMSNorm):
    """Gated norm over the heads of a mixer, in `groups`, each of them on one rank or spread over several."""

    def __init__(self, size: int, eps: float, groups: int = 1, gate_first: bool = False) -> None:
        shard = current_shard()
        own = shard.cut_or_repeat(groups, "Mamba2 groups")
        cut = shard.cut(size, "inner channels")
        super().__init__(cut.kept, eps, own.kept, gate_first)
        self.cut = cut
        # Ranks that share one group; each of them has an equal part of it.
        self.sharing = max(1, shard.ranks // groups)
        self.all_groups, self.own_group = groups, own.ranges[0][0]

    def forward(
        self,
        x: Float[Tensor, "*n size"],
        gate: Float[Tensor, "*n size"],
        batch: Batch,
        out: Float[Tensor, "*n size"] | None = None,
    ) -> Float[Tensor, "*n size"]:
        if self.sharing == 1:
            return super().forward(x, gate, batch, out)
        opening = F.silu(gate.float())
        x = x.float() * opening if self.gate_first else x.float()
        squares = self.spread_squares(x, batch)
        normed = x * (squares + self.eps).rsqrt() * self.weight
        return placed((normed if self.gate_first else normed * opening).to(gate.dtype), out)

    def spread_squares(self, x: Float[Tensor, "*n size"], batch: Batch) -> Float[Tensor, "*n 1"]:
        """Return the mean square of this rank's group, whose parts are on several ranks."""
        everywhere = x.new_zeros(*x.shape[:-1], self.all_groups)
        everywhere[..., self.own_group : self.own_group + 1] = mean_square(x) / self.sharing
        return batch.operations.add_ranks(everywhere)[..., self.own_group : self.own_group + 1]

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield Source(prefix + "weight", self.weight, cut=self.cut)
