"""Mistral (also the text part of Mistral Small 3.1): Llama with a sliding window in every layer or in none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from weft.models.config import Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.rotary import Rotary


class Mistral(DecoderModel):
    revision: ClassVar[int] = 1
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.language_model\.", "model."),
        (r"^language_model\.", ""),
    )
    ignored: ClassVar[tuple[str, ...]] = (
        *DecoderModel.ignored,
        r"^(model\.)?vision_tower\.",
        r"^(model\.)?multi_modal_projector\.",
    )

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields, sliding_window=4096)
        # Newer models inside the same multimodal architecture (Ministral 3) scale queries by position.
        config.only(model_type="mistral")
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        window = config.integer("sliding_window", default=None)
        kind = "full_attention" if window is None else "sliding_attention"
        config.check_layer_types([kind] * config.integer("num_hidden_layers"), "sliding_window")
        shape = attention_shape(config, dtype, window=window)
        blocks = [
            Block(Attention(shape), gated_mlp(config), hidden, eps) for _ in range(config.integer("num_hidden_layers"))
        ]
        decoder = frame(config, blocks, Rotary(config.rotary(), dtype))
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
