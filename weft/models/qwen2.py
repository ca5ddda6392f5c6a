"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values; the last layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from weft.models.config import Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.rotary import Rotary
from weft.models.qwen3 import windows


class Qwen2(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields, num_key_value_heads=32, sliding_window=4096)
        # No published model states them, and the public implementation computes these.
        config.only(attention_bias=True, mlp_bias=False)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        shapes = [attention_shape(config, dtype, bias=True, window=window) for window in windows(config)]
        blocks = [Block(Attention(shape), gated_mlp(config), hidden, eps) for shape in shapes]
        decoder = frame(config, blocks, Rotary(config.rotary(), dtype))
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
