"""Experts as a layer, filled from checkpoints that store them one by one or all in one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.experts import Activation, ExpertWeights, Routing, SharedExpert, gated, plain
from weft.kernels.interface import Batch, Operations
from weft.kernels.stream import Normed
from weft.models.layers.linear import Linear
from weft.models.layers.mlp import ACTIVATIONS
from weft.models.model import Layer, Source
from weft.models.sharding import current_shard, side_by_side


class ExpertLayer(Layer):
    """Weights of all experts as operations read them: matrices [experts, outputs, inputs] until they are prepared."""

    # The weights as operations read them, once filled.
    prepared: ExpertWeights | None = None

    first: nn.Parameter
    second: nn.Parameter
    activation: Activation
    first_bias: nn.Parameter | None
    second_bias: nn.Parameter | None

    @property
    def weights(self) -> ExpertWeights:
        if self.prepared is not None:
            return self.prepared
        return ExpertWeights(self.first, self.second, self.activation, self.first_bias, self.second_bias)

    def forward(
        self, x: Normed, routing: Routing, batch: Batch, shared: SharedExpert | None = None
    ) -> Float[Tensor, "tokens hidden"]:
        return batch.operations.experts(x, routing, self.weights, shared)

    def prepare(self, operations: Operations, twice: bool = False) -> None:
        """Convert the filled weights to the fastest layout of these operations; `twice`: also to one for few rows."""
        self.prepared = prepared = operations.prepare_experts(self.weights, twice)
        if prepared.first is not self.first:
            self.first = nn.Parameter(prepared.first, requires_grad=False)
        if prepared.second is not self.second:
            self.second = nn.Parameter(prepared.second, requires_grad=False)


class Experts(ExpertLayer):
    """Experts that are gated or plain MLPs. `names` are (gate, up, down) of one expert, or (up, down) without a gate.

    It accepts `N.<name>.weight` for every expert N, and the fused `gate_up_proj` (or `up_proj`) and `down_proj`,
    each [experts, outputs, inputs].
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        activation: str = "silu",
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.first_bias = self.second_bias = None
        *self.first_names, self.second_name = names
        self.cut = current_shard().cut(inner, "channels of an expert")
        self.inner = self.cut.kept
        outer = self.inner * len(self.first_names)
        self.first = nn.Parameter(torch.empty(count, outer, hidden), requires_grad=False)
        self.second = nn.Parameter(torch.empty(count, hidden, self.inner), requires_grad=False)
        kind = gated if len(self.first_names) == 2 else plain
        self.activation = kind(ACTIVATIONS[activation])

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        fused = "gate_up_proj" if len(self.first_names) == 2 else "up_proj"
        yield Source(prefix + fused, self.first, cut=side_by_side(*[self.cut] * len(self.first_names)), dim=1)
        yield Source(prefix + "down_proj", self.second, cut=self.cut, dim=2)
        for number in range(self.first.shape[0]):
            for part, name in enumerate(self.first_names):
                rows = self.first[number, part * self.inner : (part + 1) * self.inner]
                yield Source(f"{prefix}{number}.{name}.weight", rows, cut=self.cut)
            yield Source(f"{prefix}{number}.{self.second_name}.weight", self.second[number], cut=self.cut, dim=1)


class Route:
    """Choice of experts by their scores: one of the operations named route_*, with these options."""

    def __init__(self, operation: str, **options: Any) -> None:
        self.operation = operation
        self.options = options

    def __call__(self, operations: Operations, logits: Float[Tensor, "tokens experts"], **more: Any) -> Routing:
        routing: Routing = getattr(operations, self.operation)(logits, **self.options, **more)
        return routing


class SparseMLP(Layer):
    """A router and its experts. Checkpoint names: gate, experts."""

    def __init__(self, gate: Linear, experts: nn.Module, route: Route) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.route = route

    def forward(self, x: Normed, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        output: Tensor = self.experts(x, self.route(batch.operations, self.gate(x, batch)), batch)
        return output
