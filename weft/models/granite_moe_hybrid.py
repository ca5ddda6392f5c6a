"""Granite 4 hybrid: Mamba2, some attention (mostly without positions), a shared MLP and optional experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.interface import Batch
from weft.models.config import Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame, mamba2_shape
from weft.models.layers.attention import Attention
from weft.models.layers.mamba2 import Mamba2
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.moe import Experts, Route
from weft.models.layers.norm import InnerNorm
from weft.models.layers.rotary import Rotary
from weft.models.layers.shared_moe import SharedNames, SharedSparseMLP

LAYER_TYPES = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


class GraniteMoeHybrid(DecoderModel):
    revision: ClassVar[int] = 1
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
        blocks = [
            Block(builders[kind](config, dtype), mlp(config), hidden, eps, factor=factor)
            for kind in block_types(config)
        ]
        config.only(normalization_function="rmsnorm")
        rotates = config.choice("position_embedding_type", among=("nope", "rope"), default="nope") == "rope"
        rotary = Rotary(config.rotary(), dtype) if rotates else None
        decoder = frame(config, blocks, rotary, scale=config.number("embedding_multiplier", default=1.0))
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
        self.head_factor = 1.0 / config.number("logits_scaling", default=1.0)

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        return super().logits(hidden * self.head_factor, batch)


def block_types(config: Config) -> list[str]:
    count = config.integer("num_hidden_layers")
    given = config.listing("layer_types", "layers_block_type", length=count, default=["mamba"] * count)
    return config.kinds("layer_types", given, LAYER_TYPES)


def mamba(config: Config, dtype: torch.dtype) -> Mamba2:
    inner = config.integer("mamba_expand", default=2) * config.integer("hidden_size")
    shape = mamba2_shape(config, dtype, inner, out_bias=config.flag("mamba_proj_bias", default=False))
    eps = config.number("rms_norm_eps", default=1e-6)
    return Mamba2(shape, InnerNorm(shape.inner, eps, shape.groups, gate_first=True))


def attention(config: Config, dtype: torch.dtype) -> Attention:
    bias, scale = config.flag("attention_bias", default=False), config.number("attention_multiplier", default=1.0)
    return Attention(attention_shape(config, dtype, bias=bias, output_bias=bias, scale=scale))


def mlp(config: Config) -> nn.Module:
    hidden, inner = config.integer("hidden_size"), config.integer("shared_intermediate_size")
    count = config.integer("num_local_experts", default=0, minimum=0)
    if not count:
        return GatedMLP(hidden, inner, names=("input_linear",))
    return SharedSparseMLP(
        hidden,
        inner,
        SharedNames("router", ("input_linear",), "down_proj"),
        Experts(count, hidden, config.integer("intermediate_size")),
        Route("route_top", k=config.experts_per_token(count)),
    )
