"""Gemma 2: windowed and full layers in turn, sandwich norms, and scores and logits that a tanh bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.interface import Batch
from weft.models.config import WINDOWED, Config
from weft.models.decoder import DecoderModel, SandwichBlock, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.rotary import Rotary

# Bounds of a configuration that has none: fields that are null mean no bound.
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


class Gemma2(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(
            fields,
            head_dim=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            sliding_window=4096,
            vocab_size=256000,
            hidden_activation="gelu_pytorch_tanh",
            **SOFTCAPS,
        )
        config.only(use_bidirectional_attention=False)
        count = config.integer("num_hidden_layers")
        names = ["full_attention" if number % 2 else "sliding_attention" for number in range(count)]
        decoder = frame(
            config,
            [block(config, dtype, kind) for kind in config.layer_types(WINDOWED, default=names)],
            Rotary(config.rotary(), dtype),
            scale=config.integer("hidden_size") ** 0.5,
            zero_centred=True,
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=True))
        self.softcap = config.number("final_logit_softcapping", default=None)

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        logits = super().logits(hidden, batch)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def block(config: Config, dtype: torch.dtype, kind: str) -> SandwichBlock:
    hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
    bias = config.flag("attention_bias", default=False)
    shape = attention_shape(
        config,
        dtype,
        bias=bias,
        output_bias=bias,
        scale=config.number("query_pre_attn_scalar", default=256) ** -0.5,
        window=config.window(kind == "sliding"),
        softcap=config.number("attn_logit_softcapping", default=None),
    )
    return SandwichBlock(Attention(shape), gated_mlp(config), hidden, eps, zero_centred=True)
