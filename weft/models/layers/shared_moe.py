"""Routed experts with a shared one that sees every token (Qwen3-Next, Qwen3.5, Granite)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from weft.kernels.experts import SharedExpert
from weft.kernels.interface import Batch
from weft.kernels.stream import Normed
from weft.models.layers.linear import PackedLinear
from weft.models.layers.moe import Experts, Route
from weft.models.model import Layer
from weft.models.sharding import RankCut, current_shard, side_by_side


@dataclass(frozen=True, slots=True)
class SharedNames:
    """Checkpoint names inside the layer. `first` may be one matrix for gate and up, or one for each."""

    router: str
    first: tuple[str, ...]
    second: str
    opening: str | None = None  # a sigmoid that scales the shared expert's output


class SharedSparseMLP(Layer):
    """Routed and shared experts. All matmuls of the layer's input, the router's included, are one."""

    def __init__(self, hidden: int, inner: int, names: SharedNames, experts: Experts, route: Route) -> None:
        super().__init__()
        count = experts.numbers.size
        cut = current_shard().cut(inner, "channels of the shared expert")
        self.sizes = [count, 0 if names.opening is None else 1, cut.kept, cut.kept]
        opening = {} if names.opening is None else {names.opening: 1}
        both = side_by_side(*[cut] * (2 // len(names.first)))
        parts: dict[str, int | RankCut] = {names.router: count, **opening, **dict.fromkeys(names.first, both)}
        self.packed = PackedLinear(hidden, parts)
        self.second = PackedLinear(cut, {names.second: hidden})
        self.experts = experts
        self.route = route

    def forward(self, x: Normed, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        logits, opening, gate, up = self.packed(x, batch).split_with_sizes(self.sizes, -1)
        shared = SharedExpert(gate, up, self.second.weights, opening if self.sizes[1] else None)
        return self.experts.forward(x, self.route(batch.operations, logits), batch, shared)
