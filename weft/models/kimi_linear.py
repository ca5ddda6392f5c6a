"""Kimi-Linear: Kimi Delta Attention, every few layers latent attention without positions, experts with shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from weft.base.errors import ModelError
from weft.kernels.experts import SharedExpert
from weft.kernels.interface import Batch
from weft.kernels.stream import Normed
from weft.models.config import Config, shown
from weft.models.decoder import Block, DecoderModel, frame, gated_mlp, grouped_route
from weft.models.layers.channel_delta_net import ChannelDeltaNet, ChannelDeltaNetShape
from weft.models.layers.latent_attention import LatentAttention, LatentShape
from weft.models.layers.linear import PackedLinear
from weft.models.layers.moe import Experts, Router
from weft.models.model import Layer, Mixer
from weft.models.sharding import current_shard

LAYER_TYPES = {"linear_attention": "delta", "full_attention": "attention"}
MLP_TYPES = {"dense": "dense", "sparse": "sparse"}
# Epsilon of the latent's norm, independent of the configuration's other norms.
LATENT_NORM_EPS = 1e-6
# Fields that change the computation, with the only value that is supported: no published checkpoint has another.
FIXED = {
    "q_lora_rank": None,
    "mla_use_nope": True,
    "attention_bias": False,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}


class KimiLinear(DecoderModel):
    revision: ClassVar[int] = 2
    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"\.block_sparse_moe\.", ".mlp."),)

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-5)
        config.choice("hidden_act", among=("silu",), default="silu")
        config.only(**FIXED)
        kinds, mlps = config.kinds("layer_types", layer_types(config), LAYER_TYPES), mlp_types(config)
        mixers: list[Mixer] = [
            attention(config, dtype) if kind == "attention" else delta(config, dtype) for kind in kinds
        ]
        blocks = [
            Block(mixer, gated_mlp(config) if mlp == "dense" else SharedExpertMLP(config), hidden, eps)
            for mixer, mlp in zip(mixers, mlps, strict=True)
        ]
        super().__init__(
            config, frame(config, blocks, rotary=None, eps=1e-5), tied=config.flag("tie_word_embeddings", default=False)
        )


def linear_config(config: Config) -> Config:
    """Return the fields of the delta layers, which published checkpoints keep in an object of their own."""
    fields = config.fields.get("linear_attn_config") or config.fields
    if not isinstance(fields, Mapping):
        raise ModelError(f"config.json: linear_attn_config must be an object, got {shown(fields)}")
    return Config(fields)


def layer_types(config: Config) -> list[str]:
    """Return the layer types. Published checkpoints list the numbers of the layers of each type, from one on."""
    count: int = config.integer("num_hidden_layers")
    linear = linear_config(config)
    if config.fields.get("layer_types") is not None:
        if linear.fields.get("full_attn_layers") is not None:
            config.check_layer_types(listed_types(linear, count), "full_attn_layers and kda_layers", LAYER_TYPES)
        return config.listing("layer_types", length=count)
    return listed_types(linear, count)


def listed_types(linear: Config, count: int) -> list[str]:
    full, delta = (linear.listing(name) for name in ("full_attn_layers", "kda_layers"))
    listed = [*full, *delta]
    if not all(type(number) is int for number in listed) or sorted(listed) != list(range(1, count + 1)):
        raise ModelError(
            f"config.json: kda_layers and full_attn_layers must have each of 1 to {count} once, "
            f"got {shown(delta)} and {shown(full)}"
        )
    return ["full_attention" if number in full else "linear_attention" for number in range(1, count + 1)]


def mlp_types(config: Config) -> list[str]:
    """Return which layers have experts: all but the first few, unless the configuration lists them."""
    count: int = config.integer("num_hidden_layers")
    first = config.integer("first_k_dense_replace", default=1, minimum=0)
    interval = config.integer("moe_layer_freq", default=1)
    default = ["dense" if number < first or number % interval else "sparse" for number in range(count)]
    return config.kinds("mlp_layer_types", config.listing("mlp_layer_types", length=count, default=default), MLP_TYPES)


def delta(config: Config, dtype: torch.dtype) -> ChannelDeltaNet:
    linear = linear_config(config)
    shape = ChannelDeltaNetShape(
        hidden=config.integer("hidden_size"),
        heads=linear.integer("linear_num_heads", "num_heads"),
        head_dim=linear.integer("linear_head_dim", "head_dim"),
        conv_width=linear.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4, minimum=2),
        eps=config.number("rms_norm_eps", default=1e-5),
        dtype=dtype,
    )
    return ChannelDeltaNet(shape)


def attention(config: Config, dtype: torch.dtype) -> LatentAttention:
    shape = LatentShape(
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        latent=config.integer("kv_lora_rank"),
        key_dim=config.integer("qk_nope_head_dim"),
        shared_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        norm_eps=LATENT_NORM_EPS,
        dtype=dtype,
    )
    return LatentAttention(shape)


class SharedExpertMLP(Layer):
    """Experts chosen by sigmoid scores, and shared experts, which are one MLP. Checkpoint names: gate, experts,
    shared_experts.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config.integer("hidden_size"), config.integer("moe_intermediate_size")
        count = config.integer("num_experts", "num_local_experts")
        self.gate = Router(hidden, count)
        self.experts = Experts(count, hidden, inner, names=("w1", "w3", "w2"))
        self.route = grouped_route(config, count, scaling=2.446)
        shared = config.integer("num_shared_experts", "n_shared_experts", default=1)
        cut = current_shard().cut(inner * shared, "channels of shared experts")
        self.first = PackedLinear(hidden, dict.fromkeys(("shared_experts.gate_proj", "shared_experts.up_proj"), cut))
        self.second = PackedLinear(cut, {"shared_experts.down_proj": hidden})

    def forward(self, x: Normed, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        x = batch.operations.rows_of(x)
        routing = self.route(batch.operations, self.gate(x, batch), bias=self.gate.e_score_correction_bias)
        gate, up = self.first.split(x, batch)
        return self.experts.forward(x, routing, batch, SharedExpert(gate, up, self.second.weights, None))
