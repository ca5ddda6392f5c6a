"""Qwen3-Next: Gated DeltaNet, every few layers gated full attention, experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from weft.models.config import Config
from weft.models.decoder import Block, Decoder, DecoderModel
from weft.models.layers.attention import Attention, AttentionShape
from weft.models.layers.embedding import Embedding
from weft.models.layers.gated_delta_net import GatedDeltaNet, GatedDeltaShape, interleaved_projection
from weft.models.layers.linear import PackedLinear
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.moe import Experts, Route
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary
from weft.models.layers.shared_moe import SharedNames, SharedSparseMLP
from weft.models.model import Mixer

LAYER_TYPES = {
    "linear_attention": "delta",
    "mamba": "delta",
    "full_attention": "attention",
    "attention": "attention",
}
EXPERT_NAMES = SharedNames(
    "gate", ("shared_expert.gate_proj", "shared_expert.up_proj"), "shared_expert.down_proj", "shared_expert_gate"
)


class Qwen3Next(DecoderModel):
    revision: ClassVar[int] = 1
    # Whether positions have several axes, for images.
    axes: ClassVar[bool] = False
    # Fields with one supported value.
    fixed: ClassVar[dict[str, Any]] = {}
    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"\.linear_attn\.", ".self_attn."),)
    ignored: ClassVar[tuple[str, ...]] = (*DecoderModel.ignored, r"^mtp\.")

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        interval = config.integer("full_attention_interval", default=4)
        count = config.integer("num_hidden_layers")
        default = ["linear_attention" if (number + 1) % interval else "full_attention" for number in range(count)]
        if config.fields.get("full_attention_interval") is not None:
            config.check_layer_types(default, "full_attention_interval", LAYER_TYPES)
        kinds = config.layer_types(LAYER_TYPES, default=default)
        config.only(attn_output_gate=True, **self.fixed)

        def block(number: int) -> Block:
            mixer = attention(config, dtype) if kinds[number] == "attention" else self.delta(config, dtype)
            return Block(mixer, mlp(config, number), hidden, eps, zero_centred=True)

        decoder = Decoder(
            Embedding(config.integer("vocab_size"), hidden),
            [block(number) for number in range(count)],
            RMSNorm(hidden, eps, zero_centred=True),
            Rotary(config.rotary(partial=0.25, axes=self.axes), dtype),
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))

    @classmethod
    def delta(cls, config: Config, dtype: torch.dtype) -> Mixer:
        shape = GatedDeltaShape(
            hidden=config.integer("hidden_size"),
            key_heads=config.integer("linear_num_key_heads"),
            key_dim=config.integer("linear_key_head_dim"),
            value_heads=config.integer("linear_num_value_heads"),
            value_dim=config.integer("linear_value_head_dim"),
            conv_width=config.integer("linear_conv_kernel_dim", default=4, minimum=2),
            eps=config.number("rms_norm_eps", default=1e-6),
            dtype=dtype,
        )
        config.choice("hidden_act", among=("silu",), default="silu")
        return GatedDeltaNet(shape, cls.projection(shape))

    @staticmethod
    def projection(shape: GatedDeltaShape) -> PackedLinear:
        return interleaved_projection(shape)


def attention(config: Config, dtype: torch.dtype) -> Mixer:
    bias = config.flag("attention_bias", default=False)
    return Attention(
        AttentionShape(
            hidden=config.integer("hidden_size"),
            heads=config.integer("num_attention_heads"),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            bias=bias,
            output_bias=bias,
            norm_eps=config.number("rms_norm_eps", default=1e-6),
            norm_zero_centred=True,
            gated=True,
        )
    )


def mlp(config: Config, number: int) -> nn.Module:
    """Return experts, unless the model has none or keeps this layer dense."""
    hidden, experts = config.integer("hidden_size"), config.integer("num_experts", default=0, minimum=0)
    dense = number in config.listing("mlp_only_layers", default=[])
    if not experts or dense or (number + 1) % config.integer("decoder_sparse_step", default=1):
        return GatedMLP(hidden, config.integer("intermediate_size"))
    return SharedSparseMLP(
        hidden,
        config.integer("shared_expert_intermediate_size"),
        EXPERT_NAMES,
        Experts(experts, hidden, config.integer("moe_intermediate_size")),
        Route(
            "route_softmax",
            k=config.experts_per_token(experts),
            renormalise=config.flag("norm_topk_prob", default=True),
        ),
    )
