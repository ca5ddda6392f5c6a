"""LFM2: gated short convolutions, some full attention, a gated MLP in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from weft.models.config import Config
from weft.models.decoder import Block, Decoder, DecoderModel
from weft.models.layers.attention import Attention, AttentionShape
from weft.models.layers.embedding import Embedding
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary
from weft.models.layers.short_conv import ShortConv

LAYER_TYPES = {"conv": "conv", "short_conv": "conv", "full_attention": "attention", "attention": "attention"}


class Lfm2(DecoderModel):
    revision: ClassVar[int] = 1
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.embedding_norm\.", "model.norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.(q|k)_layernorm\.", r".\1_norm."),
        (r"\.conv\.(in_proj|out_proj|conv)\.", r".self_attn.\1."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.w2\.", ".down_proj."),
    )

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("norm_eps", default=1e-5)
        kinds = config.layer_types(LAYER_TYPES, default=default_layer_types(config))
        shape = AttentionShape(
            hidden=hidden,
            heads=config.integer("num_attention_heads"),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            norm_eps=eps,
        )
        width, bias = config.integer("conv_L_cache", default=3, minimum=2), config.flag("conv_bias", default=False)

        def block(number: int) -> Block:
            mixer = Attention(shape) if kinds[number] == "attention" else ShortConv(hidden, width, bias, dtype)
            return Block(mixer, self.mlp(config, number), hidden, eps)

        decoder = Decoder(
            Embedding(config.integer("vocab_size"), hidden),
            [block(number) for number in range(len(kinds))],
            RMSNorm(hidden, eps),
            Rotary(config.rotary(theta=1e6), dtype),
        )
        super().__init__(config, decoder, tied=config.flag("tie_embedding", "tie_word_embeddings", default=True))

    @staticmethod
    def mlp(config: Config, number: int) -> nn.Module:
        return GatedMLP(config.integer("hidden_size"), feed_forward_size(config))


def default_layer_types(config: Config) -> list[str]:
    """Return the layer types. Older configurations list the layers with attention; without a list, all have it."""
    count = config.integer("num_hidden_layers")
    chosen = config.listing("full_attn_idxs", default=list(range(count)))
    found = ["full_attention" if number in chosen else "conv" for number in range(count)]
    if config.fields.get("full_attn_idxs") is not None:
        config.check_layer_types(found, "full_attn_idxs", LAYER_TYPES)
    return found


def feed_forward_size(config: Config) -> int:
    """Return the given MLP size or, if the configuration adjusts it, two thirds of it, scaled and rounded up."""
    # The older name counts if both are there.
    size: int = config.integer("block_ff_dim", default=None) or config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return size
    multiple: int = config.integer("block_multiple_of", default=256)
    size = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
    return max(1, -(-size // multiple)) * multiple
