"""Qwen3-MoE: Qwen3's attention, with experts in most blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from weft.models.config import Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.linear import Linear
from weft.models.layers.mlp import ACTIVATIONS
from weft.models.layers.moe import Experts, Route, SparseMLP
from weft.models.layers.rotary import Rotary


class Qwen3Moe(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields, sliding_window=4096)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        bias = config.flag("attention_bias", default=False)
        windowed = config.flag("use_sliding_window", default=False)
        window = config.integer("sliding_window", default=None) if windowed else None
        kind = "full_attention" if window is None else "sliding_attention"
        config.check_layer_types([kind] * config.integer("num_hidden_layers"), "use_sliding_window")
        shape = attention_shape(config, dtype, bias=bias, output_bias=bias, norm_eps=eps, window=window)
        blocks = [
            Block(Attention(shape), sparse_mlp(config) if sparse else gated_mlp(config), hidden, eps)
            for sparse in sparse_layers(config)
        ]
        decoder = frame(config, blocks, Rotary(config.rotary(), dtype))
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))


def sparse_layers(config: Config) -> list[bool]:
    """Return the layers with experts: every `decoder_sparse_step`-th, except those in `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", default=1), config.listing("mlp_only_layers", default=[])
    return [index not in dense and (index + 1) % step == 0 for index in range(config.integer("num_hidden_layers"))]


def sparse_mlp(config: Config) -> nn.Module:
    hidden, count = config.integer("hidden_size"), config.integer("num_experts", "num_local_experts")
    activation = config.choice("hidden_act", among=ACTIVATIONS, default="silu")
    route = Route(
        "route_softmax",
        k=config.experts_per_token(count),
        renormalise=config.flag("norm_topk_prob", default=False),
    )
    experts = Experts(count, hidden, config.integer("moe_intermediate_size"), activation)
    return SparseMLP(Linear(hidden, count), experts, route)
