"""LFM3: short convolutions, windowed and full attention with a gate for each head, and sandwich norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from weft.base.errors import ModelError
from weft.kernels.rotary import RotaryKind
from weft.models.config import Config, shown
from weft.models.decoder import Decoder, DecoderModel, SandwichBlock, attention_shape
from weft.models.layers.attention import Attention
from weft.models.layers.embedding import Embedding
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary, RotaryByKind
from weft.models.layers.short_conv import ShortConv
from weft.models.lfm2 import Lfm2

LAYER_TYPES = {"conv": "conv", "full_attention": "full", "sliding_attention": "sliding"}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
DEFAULT_ROTARY = {"full_attention": PROPORTIONAL, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


class Lfm3(DecoderModel):
    revision: ClassVar[int] = 1
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
        (r"\.post_operator_norm\.", ".post_attention_layernorm."),
        (r"\.post_ffn_norm\.", ".post_feedforward_layernorm."),
        (r"\.layers\.(\d+)\.ffn_norm\.", r".layers.\1.pre_feedforward_layernorm."),
        *Lfm2.renames,
    )

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields, head_dim=128, sliding_window=256)
        hidden, eps = config.integer("hidden_size"), config.number("norm_eps", "rms_norm_eps", default=1e-5)
        kinds = config.layer_types(LAYER_TYPES, default=default_layer_types(config))
        decoder = Decoder(
            Embedding(config.integer("vocab_size"), hidden),
            [block(config, dtype, kind, hidden, eps) for kind in kinds],
            RMSNorm(hidden, eps),
            rotaries(config, kinds, dtype),
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", "tie_embedding", default=True))


def default_layer_types(config: Config) -> list[str]:
    count = config.integer("num_hidden_layers")
    pattern = ("sliding_attention", "conv", "full_attention", "conv")
    return ["conv" if number == 0 else pattern[number % 4] for number in range(count)]


def block(config: Config, dtype: torch.dtype, kind: str, hidden: int, eps: float) -> nn.Module:
    bias, width = config.flag("conv_bias", default=False), config.integer("conv_L_cache", default=7, minimum=2)
    mixer = ShortConv(hidden, width, bias, dtype) if kind == "conv" else attention(config, dtype, kind, eps)
    mlp = GatedMLP(hidden, config.integer("intermediate_size"))
    norms_after = config.flag("use_sandwich_norm", default=True)
    return SandwichBlock(mixer, mlp, hidden, eps, norms_after=norms_after)


def attention(config: Config, dtype: torch.dtype, kind: str, eps: float) -> Attention:
    bias = config.flag("attention_bias", default=False)
    gates = config.flag("use_attention_gate", default=True)
    window = config.window(kind == "sliding")
    shape = attention_shape(config, dtype, bias=bias, output_bias=bias, norm_eps=eps, window=window, head_gates=gates)
    return Attention(shape)


def rotaries(config: Config, kinds: list[str], dtype: torch.dtype) -> RotaryByKind:
    found = {}
    if config.fields.get("rope_parameters") is None:
        config.only(rope_scaling=None)
        config.fields["rope_parameters"] = DEFAULT_ROTARY
    for name, theta in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        kind = LAYER_TYPES[name]
        if kind in kinds:
            found[kind] = rotary(config, name, theta, dtype)
    return RotaryByKind(kinds, found)


def rotary(config: Config, layer_type: str, theta_field: str, dtype: torch.dtype) -> Rotary:
    """Return the rotation of a type of layers, as the public implementation computes it.

    `proportional` rotates a part of every head, with the frequencies of the whole head. `default` rotates whole heads,
    also where the released file states a part. Other types have no part in this architecture.
    """
    settings = dict(config.rotary_settings(layer_type, theta_field))
    share = settings.pop("partial_rotary_factor", 1.0)
    scope, variant = Config(settings | {"partial_rotary_factor": share}), settings.get("rope_type", "default")
    if variant == "proportional":
        for name in settings.keys() - {"rope_type", "rope_theta", "factor"}:
            raise ModelError(f"config.json: rope type proportional has no {shown(name)}; remove it")
        half, theta = config.head_dim // 2, scope.number("rope_theta", default=1e6)
        turned = int(scope.number("partial_rotary_factor") * config.head_dim // 2)
        factors = [scope.number("factor", default=1.0)] * turned + [math.inf] * (half - turned)
        return Rotary(RotaryKind(config.head_dim, theta), dtype, factors)
    if variant != "default" and scope.number("partial_rotary_factor") != 1:
        raise ModelError(
            f"config.json: partial_rotary_factor of rope type {shown(variant)} must be 1 for this architecture, got "
            f"{shown(share)}"
        )
    parameters = {"rope_parameters": {layer_type: settings}, "partial_rotary_factor": None, "rope_scaling": None}
    return Rotary(Config({**config.fields, **parameters}).rotary(layer_type, 1e6, theta_field), dtype)
