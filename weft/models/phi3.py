"""Phi-3 and Phi-4: Llama with queries, keys and values in one matrix, and a stretched rotation for long contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from weft.base.errors import ModelError
from weft.kernels.rotary import RotaryKind
from weft.models.config import Config, shown, turned_dimensions
from weft.models.decoder import Block, DecoderModel, attention_shape, frame
from weft.models.layers.attention import Attention
from weft.models.layers.mlp import ACTIVATIONS, GatedMLP
from weft.models.layers.rotary import Rotary

LONG = ("longrope", "su")
LONG_FIELDS = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
LONG_FIELDS |= {"factor", "attention_factor", "short_factor", "long_factor"}
# Context before it was stretched, of a configuration that has none.
ORIGINAL_CONTEXT = 4096


class Phi3(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields, max_position_embeddings=4096)
        config.only(attention_bias=False, mlp_bias=False)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-5)
        count, window = config.integer("num_hidden_layers"), config.integer("sliding_window", default=None)
        config.check_layer_types(
            ["full_attention" if window is None else "sliding_attention"] * count, "sliding_window"
        )
        activation = config.choice("hidden_act", among=ACTIVATIONS, default="silu")
        inner = config.integer("intermediate_size")
        shape = attention_shape(config, dtype, window=window, fused="qkv_proj")
        blocks = [
            Block(Attention(shape), GatedMLP(hidden, inner, activation, names=("gate_up_proj",)), hidden, eps)
            for _ in range(count)
        ]
        decoder = frame(config, blocks, rotary(config, dtype), eps=1e-5)
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))


def rotary(config: Config, dtype: torch.dtype) -> Rotary:
    settings = config.rotary_settings(None, "rope_theta")
    variant = settings.get("rope_type", "default")
    if variant in LONG:
        return long_rotary(config, settings, dtype)
    if variant != "default":
        raise ModelError(
            f"config.json: rope type of this architecture must be default or longrope, got {shown(variant)}"
        )
    settings.pop("original_max_position_embeddings", None)
    stated = {"rope_scaling": None, "original_max_position_embeddings": None, "rope_parameters": settings}
    return Rotary(Config({**config.fields, **stated}).rotary(partial=1.0), dtype)


def long_rotary(config: Config, settings: Mapping[str, Any], dtype: torch.dtype) -> Rotary:
    """Return the rotation of a stretched context, with a factor for every pair of dimensions.

    Published models have factors for contexts within the original one and others beyond it. A key is computed once and
    read by sequences of any length, so one of them counts for all: the long ones, if the model has a longer context.
    """
    for name in settings:
        if name not in LONG_FIELDS:
            raise ModelError(f"config.json: rope type longrope has no {shown(name)}; remove it")
    scope, context = Config(settings), config.context
    share, theta = scope.number("partial_rotary_factor", default=1.0), scope.number("rope_theta", default=10000.0)
    size = turned_dimensions(config.head_dim, share)
    original = scope.integer("original_max_position_embeddings", default=ORIGINAL_CONTEXT, minimum=2)
    factor = scope.number("factor", default=(context or original) / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = scope.numbers("short_factor", length=size // 2), scope.numbers("long_factor", length=size // 2)
    factors = long if (context or 0) > original else short
    return Rotary(RotaryKind(size, theta), dtype, factors, scope.number("attention_factor", default=scale))
