"""SmolLM3: Llama without positions in every fourth layer; the layers without positions may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from weft.base.errors import ModelError
from weft.models.config import WINDOWED, Config, shown
from weft.models.decoder import Block, DecoderModel, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.rotary import Rotary, RotaryByKind


class SmolLM3(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields, num_key_value_heads=4)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        bias, mlp_bias = (config.flag(name, default=False) for name in ("attention_bias", "mlp_bias"))
        turned = rotated_layers(config)
        shapes = [
            attention_shape(config, dtype, bias=bias, output_bias=bias, window=window)
            for window in windows(config, turned)
        ]
        blocks = [Block(Attention(shape), gated_mlp(config, mlp_bias), hidden, eps) for shape in shapes]
        rotary = Rotary(config.rotary(theta=2e6), dtype)
        kinds = ["rotated" if each else "plain" for each in turned]
        decoder = frame(config, blocks, RotaryByKind(kinds, {"rotated": rotary}))
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=True))


def rotated_layers(config: Config) -> list[bool]:
    """Return whether each layer has positions."""
    count = config.integer("num_hidden_layers")
    every = config.integer("no_rope_layer_interval", default=4)
    default = [int((number + 1) % every != 0) for number in range(count)]
    given = config.listing("no_rope_layers", default=default)
    if len(given) < count or not all(type(each) is int and each in (0, 1) for each in given):
        raise ModelError(
            f"config.json: no_rope_layers must have a 0 or 1 for each of {count} layers, got {shown(given)}"
        )
    return [bool(each) for each in given[:count]]


def windows(config: Config, rotated: list[bool]) -> list[int | None]:
    """Return the window of each layer; without `layer_types`, those without positions have one."""
    windowed = config.flag("use_sliding_window", default=False)
    window = config.integer("sliding_window", default=None) if windowed else None
    names = ["full_attention" if each or window is None else "sliding_attention" for each in rotated]
    kinds = config.layer_types(WINDOWED, default=names)
    if window is None and "sliding" in kinds:
        raise ModelError("config.json: layer_types has sliding_attention, which needs use_sliding_window and a window")
    return [window if kind == "sliding" else None for kind in kinds]
