"""Falcon-H1: in every block Mamba2 and full attention in parallel, then a gated MLP, with factors everywhere.

Factors of mixers and gates are folded into weights at load; the factor of an MLP's output is applied when the stream
adds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import View
from weft.kernels.interface import Batch
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Residual
from weft.models.config import Config
from weft.models.decoder import DecoderModel, attention_shape, frame, mamba2_shape
from weft.models.layers.attention import Attention
from weft.models.layers.mamba2 import Mamba2, Mamba2Shape
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.norm import InnerNorm, RMSNorm
from weft.models.layers.parallel import Parallel
from weft.models.layers.rotary import Rotary
from weft.models.model import Layer, Source, sources


class FalconH1(DecoderModel):
    revision: ClassVar[int] = 1
    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"^model\.final_layernorm\.", "model.norm."),)
    ignored: ClassVar[tuple[str, ...]] = (*DecoderModel.ignored, r"\.mup_vector$")

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        config.choice("hidden_act", among=("silu",), default="silu")
        config.only(attn_layer_indices=None)
        blocks = [ParallelBlock(config, dtype) for _ in range(config.integer("num_hidden_layers"))]
        rotary = Rotary(config.rotary(), dtype)
        decoder = frame(config, blocks, rotary, scale=multiplier(config, "embedding"), eps=1e-5)
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
        self.head_factor = multiplier(config, "lm_head")

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        return super().logits(hidden * self.head_factor, batch)


class ParallelBlock(Layer):
    """Parallel mixers, then an MLP. Checkpoint names: input_layernorm, mamba, self_attn, pre_ff_layernorm,
    feed_forward.
    """

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-5)
        bias = config.flag("attention_bias", default=False)
        shape = mamba2_shape(
            config,
            dtype,
            inner=config.integer("mamba_d_ssm", default=config.integer("mamba_expand", default=2) * hidden),
            out_bias=config.flag("projectors_bias", default=False),
        )
        self.input_layernorm = RMSNorm(hidden, eps)
        self.mixers = Parallel(
            {
                "mamba": Mamba2(shape, mamba_norm(config, shape, eps)),
                "self_attn": Attention(attention_shape(config, dtype, bias=bias, output_bias=bias)),
            },
            factors={"mamba": multiplier(config, "ssm_out"), "self_attn": multiplier(config, "attention_out")},
        )
        self.pre_ff_layernorm = RMSNorm(hidden, eps)
        bias = config.flag("mlp_bias", default=False)
        self.feed_forward = GatedMLP(hidden, config.integer("intermediate_size"), bias=bias)
        gate, self.mlp_factor = config.numbers("mlp_multipliers", length=2, default=[1.0, 1.0])
        self.folded = folded_factors(config, shape.local, gate)

    def forward(self, stream: Residual, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> None:
        stream.add(self.mixers(stream.read(self.input_layernorm), rotation, batch, views))
        stream.add(self.feed_forward(stream.read(self.pre_ff_layernorm), batch), self.mlp_factor)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        for name, child in self.named_children():
            for source in sources(child, f"{prefix}{name}."):
                factor = self.folded.get(source.name.removeprefix(prefix))
                yield source if factor is None else replace(source, factor=factor)


def folded_factors(config: Config, shape: Mamba2Shape, gate: float) -> dict[str, float | list[float]]:
    """Return the factors of a block's weights. A factor of a projection's input does not apply to its bias."""
    key, attention, mamba = (multiplier(config, name) for name in ("key", "attention_in", "ssm_in"))
    # Gate, x, B, C and dt have their own factors.
    width = shape.groups * shape.state
    sizes = [shape.inner, shape.inner, width, width, shape.heads]
    factors = config.numbers("ssm_multipliers", length=5, default=[1.0] * 5)
    rows = [factor for factor, size in zip(factors, sizes) for _ in range(size)]
    return {
        "mamba.in_proj.weight": [mamba * row for row in rows],
        "mamba.in_proj.bias": rows,
        "self_attn.q_proj.weight": attention,
        "self_attn.k_proj.weight": attention * key,
        "self_attn.k_proj.bias": key,
        "self_attn.v_proj.weight": attention,
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.gate_proj.bias": gate,
    }


def multiplier(config: Config, name: str) -> float:
    factor: float = config.number(f"{name}_multiplier", default=1.0)
    return factor


def mamba_norm(config: Config, shape: Mamba2Shape, eps: float) -> InnerNorm | None:
    if not config.flag("mamba_rms_norm", default=False):
        return None
    gate_first = not config.flag("mamba_norm_before_gate", default=True)
    return InnerNorm(shape.inner, eps, shape.groups, gate_first)
