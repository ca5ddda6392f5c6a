"""Norms as layers: they hold the weights, operations compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.interface import Batch
from weft.models.layers.linear import parent_of
from weft.models.model import Layer, Source


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

    def __init__(self, queries: int, keys: int, eps: float) -> None:
        super().__init__()
        self.sizes, self.eps = [queries, keys], eps
        self.weight = nn.Parameter(torch.empty(queries + keys), requires_grad=False)

    def forward(self, projected: Float[Tensor, "tokens projected"], batch: Batch) -> Float[Tensor, "tokens projected"]:
        """Norm the queries and keys at the start of `projected`."""
        queries, keys = self.sizes
        parts = projected.split_with_sizes([queries, keys, projected.shape[1] - queries - keys], -1)
        weights = self.weight.split(self.sizes)
        norm = batch.operations.rms_norm
        normed = (norm(part.contiguous(), weight, self.eps) for part, weight in zip(parts, weights))
        return torch.cat([*normed, parts[2]], -1)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        for name, weight in zip(("q_norm", "k_norm"), self.weight.split(self.sizes)):
            yield Source(f"{parent_of(prefix)}{name}.weight", weight)


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
