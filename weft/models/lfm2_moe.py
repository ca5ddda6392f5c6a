"""LFM2-MoE: LFM2 with experts instead of one MLP in its deeper blocks."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.interface import Batch
from weft.kernels.stream import Normed
from weft.models.config import Config
from weft.models.layers.linear import Linear
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.moe import Experts, Route
from weft.models.lfm2 import Lfm2
from weft.models.model import Layer


class Lfm2Moe(Lfm2):
    revision: ClassVar[int] = 1

    @staticmethod
    def mlp(config: Config, number: int) -> nn.Module:
        if number < config.integer("num_dense_layers", default=2, minimum=0):
            return GatedMLP(config.integer("hidden_size"), config.integer("intermediate_size"))
        return BiasedSparseMLP(config)


class BiasedSparseMLP(Layer):
    """Sparse MLP. Checkpoint names: gate, expert_bias (affects the choice of experts, not their weights), experts."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, count = config.integer("hidden_size"), config.integer("num_experts")
        self.gate = Linear(hidden, count)
        biased = config.flag("use_expert_bias", default=True)
        self.register_buffer("expert_bias", torch.empty(count, dtype=torch.float32) if biased else None)
        self.experts = Experts(count, hidden, config.integer("moe_intermediate_size"))
        self.route = Route(
            "route_sigmoid",
            k=config.experts_per_token(count),
            renormalise=config.flag("norm_topk_prob", default=True),
            scaling=config.number("routed_scaling_factor", default=1.0),
            eps=1e-6,
        )

    def forward(self, x: Normed, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        routing = self.route(batch.operations, self.gate(x, batch), bias=self.expert_bias)
        return self.experts.forward(x, routing, batch)
