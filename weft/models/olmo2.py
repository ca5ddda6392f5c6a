"""OLMo 2 and OLMo 3: norms after both halves of a block and over all heads; OLMo 3 has windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from weft.models.config import WINDOWED, Config
from weft.models.decoder import DecoderModel, PostNormBlock, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.rotary import Rotary, RotaryByKind


class Olmo2(DecoderModel):
    revision: ClassVar[int] = 1

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        kinds, rotary = self.layers(config, dtype)
        blocks = [block(config, dtype, config.window(kind == "sliding")) for kind in kinds]
        decoder = frame(config, blocks, rotary, eps=1e-5)
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))

    @staticmethod
    def layers(config: Config, dtype: torch.dtype) -> tuple[list[str], Rotary | RotaryByKind]:
        """Return the kind of every layer, and how they are rotated."""
        names = ["full_attention"] * config.integer("num_hidden_layers")
        config.check_layer_types(names, "the architecture")
        return config.kinds("layer_types", names, WINDOWED), Rotary(config.rotary(), dtype)


class Olmo3(Olmo2):
    revision: ClassVar[int] = 1

    @staticmethod
    def layers(config: Config, dtype: torch.dtype) -> tuple[list[str], RotaryByKind]:
        config.fields.setdefault("sliding_window", 4096)
        count = config.integer("num_hidden_layers")
        names = ["sliding_attention" if (number + 1) % 4 else "full_attention" for number in range(count)]
        kinds = config.layer_types(WINDOWED, default=names)
        # A theta beside them is that of the full layers only, and so is the old spelling's scale.
        full = config.rotary("full_attention", theta=5e5)
        local = config.rotary("sliding_attention", theta=5e5, theta_field="rope_local_base_freq")
        return kinds, RotaryByKind(kinds, {"full": Rotary(full, dtype), "sliding": Rotary(local, dtype)})


def block(config: Config, dtype: torch.dtype, window: int | None) -> PostNormBlock:
    eps, bias = config.number("rms_norm_eps", default=1e-5), config.flag("attention_bias", default=False)
    shape = attention_shape(
        config, dtype, bias=bias, output_bias=bias, norm_eps=eps, norm_across_heads=True, window=window
    )
    return PostNormBlock(Attention(shape), gated_mlp(config), config.integer("hidden_size"), eps)
