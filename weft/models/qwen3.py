"""Qwen3: queries and keys are normed; the last layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from weft.base.errors import ModelError
from weft.models.config import WINDOWED, Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.rotary import Rotary


class Qwen3(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields, head_dim=128, sliding_window=4096)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        bias = config.flag("attention_bias", default=False)
        blocks = []
        for window in windows(config):
            shape = attention_shape(config, dtype, bias=bias, output_bias=bias, norm_eps=eps, window=window)
            blocks.append(Block(Attention(shape), gated_mlp(config), hidden, eps))
        decoder = frame(config, blocks, Rotary(config.rotary(), dtype))
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))


def windows(config: Config) -> list[int | None]:
    """Return the window of each layer; without `layer_types`, all from `max_window_layers` on have one."""
    windowed = config.flag("use_sliding_window", default=False)
    window = config.integer("sliding_window", default=None) if windowed else None
    first = config.integer("max_window_layers", default=28, minimum=0) if window else _layers(config)
    names = ["full_attention" if index < first else "sliding_attention" for index in range(_layers(config))]
    kinds = config.layer_types(WINDOWED, default=names)
    if window is None and "sliding" in kinds:
        raise ModelError("config.json: layer_types has sliding_attention, which needs use_sliding_window and a window")
    return [window if kind == "sliding" else None for kind in kinds]


def _layers(config: Config) -> int:
    count: int = config.integer("num_hidden_layers")
    return count
