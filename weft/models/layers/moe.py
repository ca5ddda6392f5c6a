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
from weft.models.model import Layer, MatrixLayer, Source, declared
from weft.models.sharding import RankCut, current_shard, side_by_side


class ExpertLayer(MatrixLayer):
    """Weights of all experts: two matrices [experts, outputs, inputs] in the format of the checkpoint."""

    # The weights as operations read them, once filled.
    prepared: ExpertWeights | None = None

    # The experts that this rank holds, and its part of the channels of each.
    numbers: RankCut
    channels: RankCut

    first: nn.Parameter
    second: nn.Parameter
    activation: Activation
    first_bias: nn.Parameter | None
    second_bias: nn.Parameter | None

    @property
    def weights(self) -> ExpertWeights:
        if self.prepared is not None:
            return self.prepared
        [first], [second] = self.parts_of("first"), self.parts_of("second")
        return ExpertWeights(first, second, self.activation, self.first_bias, self.second_bias)

    def forward(
        self, x: Normed, routing: Routing, batch: Batch, shared: SharedExpert | None = None
    ) -> Float[Tensor, "tokens hidden"]:
        weights, chosen = routing
        if not self.numbers.is_whole:
            # Other ranks' experts get numbers outside the range of this rank's, and are left out.
            chosen = chosen - self.numbers.ranges[0][0]
        return batch.operations.experts(x, (weights, chosen), self.weights, shared)

    def cut_of(self, channels: RankCut, dim: int) -> dict[str, Any]:
        """Return the part of a tensor of all experts that this rank reads: its experts, or its channels of each."""
        return {"cut": channels, "dim": dim} if self.numbers.is_whole else {"cut": self.numbers, "dim": 0}

    def prepare(self, operations: Operations, twice: bool = False) -> None:
        """Convert the filled weights to the fastest formats of these operations; `twice`: also to one for few rows."""
        self.prepared = prepared = operations.prepare_experts(self.weights, twice)
        self.store("first", (prepared.first,))
        self.store("second", (prepared.second,))


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
        self.numbers, self.channels = current_shard().cut_experts(count, inner)
        held, self.inner = self.numbers.kept, self.channels.kept
        outer = self.inner * len(self.first_names)
        self.first = declared(held, outer, hidden)
        self.second = declared(held, hidden, self.inner)
        kind = gated if len(self.first_names) == 2 else plain
        self.activation = kind(ACTIVATIONS[activation])

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        fused = "gate_up_proj" if len(self.first_names) == 2 else "up_proj"
        outputs = side_by_side(*[self.channels] * len(self.first_names))
        yield Source(prefix + fused, self.first, **self.cut_of(outputs, dim=1))
        yield Source(prefix + "down_proj", self.second, **self.cut_of(self.channels, dim=2))
        (start, end), nothing = self.numbers.ranges[0], RankCut(self.channels.size, ((0, 0),))
        for number in range(self.numbers.size):
            mine = start <= number < end
            # Of another rank's expert nothing is read.
            place, inner, cut = (number - start, self.inner, self.channels) if mine else (0, 0, nothing)
            for part, name in enumerate(self.first_names):
                rows = self.first[place, part * inner : (part + 1) * inner]
                yield Source(f"{prefix}{number}.{name}.weight", rows, cut=cut)
            second = self.second[place, :, :inner]
            yield Source(f"{prefix}{number}.{self.second_name}.weight", second, cut=cut, dim=1)


class Route:
    """Choice of experts by their scores: one of the operations named route_*, with these options."""

    def __init__(self, operation: str, **options: Any) -> None:
        self.operation = operation
        self.options = options

    def __call__(self, operations: Operations, logits: Float[Tensor, "tokens experts"], **more: Any) -> Routing:
        routing: Routing = getattr(operations, self.operation)(logits, **self.options, **more)
        return routing


class Router(Linear):
    """Scores of experts, in float32; the bias affects only which experts are chosen."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__(hidden, experts)
        self.weight = declared(experts, hidden, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", torch.empty(experts, dtype=torch.float32))

    def forward(self, x: Normed, batch: Batch) -> Float[Tensor, "tokens experts"]:
        return batch.operations.score_experts(x, self.weights)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield from super().checkpoint_sources(prefix)
        yield Source(prefix + "e_score_correction_bias", self.e_score_correction_bias)

    def initialise(self, generator: torch.Generator) -> None:
        self.weight.normal_(std=self.weight.shape[1] ** -0.5, generator=generator)
        self.e_score_correction_bias.normal_(std=0.1, generator=generator)


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
