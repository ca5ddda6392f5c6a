"""Llama: full attention and a gated MLP in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weft.models.config import Config
from weft.models.decoder import Block, Decoder, DecoderModel
from weft.models.layers.attention import Attention, AttentionShape
from weft.models.layers.embedding import Embedding
from weft.models.layers.mlp import ACTIVATIONS, GatedMLP
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary


class Llama(DecoderModel):
    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        bias = config.flag("attention_bias", default=False)
        shape = AttentionShape(
            hidden=hidden,
            heads=config.integer("num_attention_heads"),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            bias=bias,
            output_bias=bias,
        )

        def block() -> nn.Module:
            mlp = GatedMLP(
                hidden,
                config.integer("intermediate_size"),
                config.choice("hidden_act", among=ACTIVATIONS, default="silu"),
                config.flag("mlp_bias", default=False),
            )
            return Block(Attention(shape), mlp, hidden, eps)

        decoder = Decoder(
            Embedding(config.integer("vocab_size"), hidden),
            [block() for _ in range(config.integer("num_hidden_layers"))],
            RMSNorm(hidden, eps),
            Rotary(config.rotary(), dtype),
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
