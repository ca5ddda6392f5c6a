"""Gemma 3 (the text part): five windowed layers per full one, each kind with its own rotation; sandwich norms."""

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
from weft.models.layers.rotary import Rotary, RotaryByKind


class Gemma3(DecoderModel):
    revision: ClassVar[int] = 2
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
        config = Config(
            fields,
            head_dim=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            sliding_window=4096,
            vocab_size=262208,
            hidden_activation="gelu_pytorch_tanh",
        )
        config.only(use_bidirectional_attention=False, attn_logit_softcapping=None)
        names = None if config.fields.get("layer_types") is not None else default_layer_types(config)
        kinds = config.layer_types(WINDOWED, default=names)
        full = Rotary(config.rotary("full_attention", theta=1e6), dtype)
        local = Rotary(config.rotary("sliding_attention", theta_field="rope_local_base_freq"), dtype)
        decoder = frame(
            config,
            [sandwich_block(config, dtype, kind, norm_zero_centred=True) for kind in kinds],
            RotaryByKind(kinds, {"full": full, "sliding": local}),
            scale=config.integer("hidden_size") ** 0.5,
            zero_centred=True,
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=True))
        self.softcap = config.number("final_logit_softcapping", default=None)

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        logits = super().logits(hidden, batch)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def default_layer_types(config: Config) -> list[str]:
    pattern = config.integer("sliding_window_pattern", default=6)
    count = config.integer("num_hidden_layers")
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]


def sandwich_block(config: Config, dtype: torch.dtype, kind: str, **more: Any) -> SandwichBlock:
    """Return a block of Gemma 3; `more` are attention options."""
    hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
    bias = config.flag("attention_bias", default=False)
    shape = attention_shape(
        config,
        dtype,
        bias=bias,
        output_bias=bias,
        scale=config.number("query_pre_attn_scalar", default=256) ** -0.5,
        window=config.window(kind == "sliding"),
        norm_eps=eps,
        **more,
    )
    return SandwichBlock(Attention(shape), gated_mlp(config), hidden, eps, zero_centred=True)
