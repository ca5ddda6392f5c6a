"""OLMo-Hybrid: Gated DeltaNet with norms before its parts; every few layers attention with norms after its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from weft.base.errors import ModelError
from weft.models.config import Config
from weft.models.decoder import Block, DecoderModel, PostNormBlock, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.gated_delta_net import GatedDeltaNet, GatedDeltaShape
from weft.models.layers.linear import PackedLinear
from weft.models.layers.rotary import Rotary
from weft.models.model import Layer

LAYER_TYPES = {"linear_attention": "delta", "full_attention": "attention"}
# Published checkpoints store the convolution over queries, keys and values as three.
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
# Epsilon of the norm after the delta rule, independent of the configuration's other norms.
DELTA_NORM_EPS = 1e-5


class OlmoHybrid(DecoderModel):
    revision: ClassVar[int] = 2
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.linear_attn\.o_norm\.", ".self_attn.norm."),
        (r"\.linear_attn\.o_proj\.", ".self_attn.out_proj."),
        (r"\.linear_attn\.", ".self_attn."),
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    )

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        config.choice("hidden_act", among=("silu",), default="silu")
        count = config.integer("num_hidden_layers")
        default = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(count)]
        if count < 4:
            default[-1] = "full_attention"

        def block(kind: str) -> Layer:
            if kind == "delta":
                return Block(delta(config, dtype), gated_mlp(config), hidden, eps)
            bias = config.flag("attention_bias", default=False)
            shape = attention_shape(config, dtype, bias=bias, output_bias=bias, norm_eps=eps, norm_across_heads=True)
            return PostNormBlock(Attention(shape), gated_mlp(config), hidden, eps)

        blocks: list[nn.Module] = [block(kind) for kind in config.layer_types(LAYER_TYPES, default=default)]
        decoder = frame(config, blocks, Rotary(config.rotary(), dtype) if rotates(config) else None)
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))


def delta(config: Config, dtype: torch.dtype) -> GatedDeltaNet:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    key_heads = config.integer("linear_num_key_heads", default=heads)
    key_dim = config.integer("linear_key_head_dim", default=int(0.75 * hidden / key_heads))
    shape = GatedDeltaShape(
        hidden=hidden,
        key_heads=key_heads,
        key_dim=key_dim,
        value_heads=config.integer("linear_num_value_heads", default=heads),
        value_dim=config.integer("linear_value_head_dim", default=2 * key_dim),
        conv_width=config.integer("linear_conv_kernel_dim", default=4, minimum=2),
        eps=DELTA_NORM_EPS,
        dtype=dtype,
        # Rates of correction above one flip a key's content: eigenvalues below zero.
        most_correction=2.0 if config.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )
    sizes = [shape.keys, shape.keys, shape.values, shape.values, shape.head_cut, shape.head_cut]
    names = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"]
    return GatedDeltaNet(shape, PackedLinear(hidden, dict(zip(names, sizes))), CONVOLUTIONS)


def rotates(config: Config) -> bool:
    """Return whether queries and keys are rotated by position. Published checkpoints say so with a theta of null."""
    fields = config.fields
    parameters = fields.get("rope_parameters")
    places = [fields, *([parameters] if isinstance(parameters, Mapping) else [])]
    nulls = [name for place in places for name in ("rope_theta", "rope_type") if name in place and place[name] is None]
    if nulls and not fields.get("rope_scaling") and all(place.get("rope_theta") is None for place in places):
        return False
    if not parameters and not fields.get("rope_scaling") and fields.get("rope_theta") is None:
        raise ModelError(
            "config.json must have rope_theta in rope_parameters for this architecture: a number, or null for "
            "attention without positions"
        )
    return True
