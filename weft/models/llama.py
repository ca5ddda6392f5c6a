"""Llama: full attention and a gated MLP in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from weft.models.config import Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.rotary import Rotary


class Llama(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        bias, mlp_bias = (config.flag(name, default=False) for name in ("attention_bias", "mlp_bias"))
        shape = attention_shape(config, dtype, bias=bias, output_bias=bias)
        config.check_layer_types(["full_attention"] * config.integer("num_hidden_layers"), "the architecture")
        blocks = [
            Block(Attention(shape), gated_mlp(config, mlp_bias), hidden, eps)
            for _ in range(config.integer("num_hidden_layers"))
        ]
        decoder = frame(config, blocks, Rotary(config.rotary(), dtype))
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
