"""Granite 4 hybrid: Mamba2, some attention (mostly without positions), a shared MLP and, if any, experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.moe import route_top
from weft.models.config import Config
from weft.models.decoder import Block, Decoder, DecoderModel
from weft.models.layers.attention import Attention, AttentionShape
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import PackedLinear
from weft.models.layers.mamba2 import UNLIMITED, Mamba2, Mamba2Shape, head_dim_of, time_step_limit
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.moe import Experts
from weft.models.layers.norm import GatedRMSNorm, RMSNorm
from weft.models.layers.rotary import Rotary
from weft.models.layers.shared_moe import SharedNames, SharedSparseMLP

LAYER_TYPES = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


class GraniteMoeHybrid(DecoderModel):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.mamba\.", ".self_attn."),
        (r"\.block_sparse_moe\.router(\.layer)?\.", ".mlp.router."),
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
        (r"\.shared_mlp\.", ".mlp."),
    )

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        config.choice("hidden_act", among=("silu",), default="silu")
        builders = {"mamba": mamba, "attention": attention}
        factor = config.number("residual_multiplier", default=1.0)
        decoder = Decoder(
            Embedding(config.integer("vocab_size"), hidden, config.number("embedding_multiplier", default=1.0)),
            [
                Block(builders[kind](config, dtype), mlp(config), hidden, eps, factor=factor)
                for kind in block_types(config)
            ],
            RMSNorm(hidden, eps),
            Rotary(config.rotary(), dtype) if config.fields.get("position_embedding_type") == "rope" else None,
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
        self.head_factor = 1.0 / config.number("logits_scaling", default=1.0)

    def logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        return super().logits(hidden * self.head_factor)


def block_types(config: Config) -> list[str]:
    count = config.integer("num_hidden_layers")
    given = config.listing("layer_types", "layers_block_type", length=count, default=["mamba"] * count)
    return config.kinds("layer_types", given, LAYER_TYPES)


def mamba(config: Config, dtype: torch.dtype) -> Mamba2:
    hidden, heads = config.integer("hidden_size"), config.integer("mamba_n_heads")
    bias = config.flag("mamba_proj_bias", default=False)
    shape = Mamba2Shape(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim_of(config.integer("mamba_expand", default=2) * hidden, heads),
        groups=config.integer("mamba_n_groups", default=1),
        state=config.integer("mamba_d_state"),
        conv_width=config.integer("mamba_d_conv", default=4, minimum=2),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        time_step_limit=time_step_limit(config.listing("time_step_limit", length=2, default=UNLIMITED)),
        dtype=dtype,
    )
    eps = config.number("rms_norm_eps", default=1e-6)
    return Mamba2(shape, GatedRMSNorm(shape.inner, eps, gate_first=True))


def attention(config: Config, dtype: torch.dtype) -> Attention:
    bias = config.flag("attention_bias", default=False)
    return Attention(
        AttentionShape(
            hidden=config.integer("hidden_size"),
            heads=config.integer("num_attention_heads"),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            scale=config.number("attention_multiplier", default=1.0),
            bias=bias,
            output_bias=bias,
        )
    )


def mlp(config: Config) -> nn.Module:
    hidden, inner = config.integer("hidden_size"), config.integer("shared_intermediate_size")
    count = config.integer("num_local_experts", default=0, minimum=0)
    if not count:
        dense = GatedMLP(hidden, inner)
        dense.gate_up = PackedLinear(hidden, {"input_linear": 2 * inner})
        return dense
    return SharedSparseMLP(
        hidden,
        inner,
        SharedNames("router", ("input_linear",), "down_proj"),
        Experts(count, hidden, config.integer("intermediate_size")),
        partial(route_top, k=config.experts_per_token(count)),
    )
