"""Falcon-H1: in every block Mamba2 and full attention side by side, then a gated MLP, with factors everywhere.

Both mixers read the same input, which one product projects for them, and leave their outcomes side by side, of which
another makes what is added to the stream. Factors of mixers and gates are folded into weights when they are loaded;
that of an MLP's outcome rides along in its addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch
from weft.kernels.beside import beside
from weft.kernels.norm import LazyNorm
from weft.kernels.placing import side_by_side
from weft.kernels.rotary import Rotation
from weft.memory.device.store import View
from weft.models.config import Config
from weft.models.decoder import Decoder, DecoderModel
from weft.models.layers.attention import Attention, AttentionShape
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Addend, JoinedLinear, PackedLinear
from weft.models.layers.mamba2 import UNLIMITED, Mamba2, Mamba2Shape, head_dim_of, time_step_limit
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.norm import GatedRMSNorm, RMSNorm
from weft.models.layers.residual import Residual
from weft.models.layers.rotary import Rotary
from weft.models.model import Layer, Source, sources


class FalconH1(DecoderModel):
    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"^model\.final_layernorm\.", "model.norm."),)
    ignored: ClassVar[tuple[str, ...]] = (*DecoderModel.ignored, r"\.mup_vector$")

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-5)
        config.choice("hidden_act", among=("silu",), default="silu")
        decoder = Decoder(
            Embedding(config.integer("vocab_size"), hidden, config.number("embedding_multiplier", default=1.0)),
            [ParallelBlock(config, dtype) for _ in range(config.integer("num_hidden_layers"))],
            RMSNorm(hidden, eps),
            Rotary(config.rotary(), dtype),
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))
        self.head_factor = config.number("lm_head_multiplier", default=1.0)

    def logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        return super().logits(hidden * self.head_factor)


class ParallelBlock(Layer):
    """Checkpoint names: input_layernorm, mamba, self_attn, pre_ff_layernorm, feed_forward."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-5)
        shape, attention = mamba_shape(config, dtype), attention_shape(config, dtype)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.in_proj = joint_projection(shape, attention)
        norm, alone = mamba_norm(config, shape, eps), self.in_proj is None
        self.mamba = Mamba2(shape, norm, projects_in=alone, projects_out=False)
        self.self_attn = Attention(attention, projects_in=alone, projects_out=False)
        self.out_proj = joint_output(config, shape, attention)
        self.pre_ff_layernorm = RMSNorm(hidden, eps)
        bias = config.flag("mlp_bias", default=False)
        self.feed_forward = GatedMLP(hidden, config.integer("intermediate_size"), bias=bias)
        self.mlp_factor = mlp_factors(config)[1]
        self.folded = folded_factors(config, shape)

    def forward(self, stream: Residual, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> None:
        stream.add(self.mix(stream.offer(self.input_layernorm), rotation, batch, views))
        stream.add(self.feed_forward(stream.offer(self.pre_ff_layernorm)), self.mlp_factor)

    def mix(
        self,
        normed: Float[Tensor, "tokens hidden"] | LazyNorm,
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
    ) -> Float[Tensor, "*parts tokens hidden"]:
        """What Mamba2 makes of its input and what attention does, added up."""
        to_scan, to_attend = self.project(normed)
        mixed, (scanned, attended) = side_by_side(to_scan, self.out_proj.sizes)
        beside(
            to_scan,
            lambda: self.mamba.mix_projected(to_scan, batch, views, scanned),
            lambda: self.self_attn.mix_projected(to_attend, rotation, batch, views, attended),
        )
        return self.out_proj.unsummed(mixed)

    def project(self, normed: Float[Tensor, "tokens hidden"] | LazyNorm) -> tuple[Tensor, Tensor]:
        """What Mamba2 reads, and what attention does."""
        if self.in_proj is None:
            assert self.mamba.in_proj is not None
            assert self.self_attn.qkv is not None
            return self.mamba.in_proj(normed), self.self_attn.qkv(normed)
        of_mamba = sum(self.mamba.shape.sections)
        projected = self.in_proj(normed)
        return projected[:, -of_mamba:], projected[:, :-of_mamba]

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        for name, child in self.named_children():
            for source in sources(child, f"{prefix}{name}."):
                factor = self.folded.get(source.name.removeprefix(prefix))
                yield source if factor is None else replace(source, transform=partial(scaled, factor=factor))


def joint_projection(mamba: Mamba2Shape, attention: AttentionShape) -> PackedLinear | None:
    """For both mixers, unless only one of them has a bias: then each has a product of its own."""
    if mamba.in_bias != attention.bias:
        return None
    # What Mamba2 reads ends with one number for each head: it comes last, so that all begins at aligned addresses.
    parts = {f"self_attn.{name}": size for name, size in attention.sections.items()}
    return PackedLinear(mamba.hidden, {**parts, "mamba.in_proj": sum(mamba.sections)}, mamba.in_bias)


def joint_output(config: Config, mamba: Mamba2Shape, attention: AttentionShape) -> JoinedLinear:
    of_mamba, of_attention = (config.number(f"{name}_out_multiplier", default=1.0) for name in ("ssm", "attention"))
    addends = {
        "mamba.out_proj": Addend(mamba.inner, of_mamba, mamba.out_bias),
        "self_attn.o_proj": Addend(attention.inner, of_attention, attention.output_bias),
    }
    return JoinedLinear(addends, mamba.hidden)


def scaled(stored: Tensor, factor: float | list[float]) -> Tensor:
    """One factor for all, or one for each row."""
    factors = torch.tensor(factor, dtype=torch.float32)
    return stored.float() * factors.view(-1, *[1] * (stored.ndim - 1))


def folded_factors(config: Config, shape: Mamba2Shape) -> dict[str, float | list[float]]:
    """What the weights of a block are multiplied by. Where a projection has a bias, its input's factor spares it."""
    key, attention_in = (config.number(f"{name}_multiplier", default=1.0) for name in ("key", "attention_in"))
    mamba_in, gate = config.number("ssm_in_multiplier", default=1.0), mlp_factors(config)[0]
    # Gate, x, B, C and dt have factors of their own.
    width = shape.groups * shape.state
    sections = zip(
        config.numbers("ssm_multipliers", length=5, default=[1.0] * 5),
        [shape.inner, shape.inner, width, width, shape.heads],
    )
    rows = [factor for factor, size in sections for _ in range(size)]
    return {
        "mamba.in_proj.weight": [mamba_in * row for row in rows],
        "mamba.in_proj.bias": rows,
        "self_attn.q_proj.weight": attention_in,
        "self_attn.k_proj.weight": attention_in * key,
        "self_attn.k_proj.bias": key,
        "self_attn.v_proj.weight": attention_in,
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.gate_proj.bias": gate,
    }


def mlp_factors(config: Config) -> tuple[float, float]:
    """Of the gate and of the outcome."""
    gate, down = config.numbers("mlp_multipliers", length=2, default=[1.0, 1.0])
    return gate, down


def mamba_shape(config: Config, dtype: torch.dtype) -> Mamba2Shape:
    hidden, heads = config.integer("hidden_size"), config.integer("mamba_n_heads")
    inner = config.integer("mamba_d_ssm", default=config.integer("mamba_expand", default=2) * hidden)
    return Mamba2Shape(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim_of(inner, heads),
        groups=config.integer("mamba_n_groups", default=1),
        state=config.integer("mamba_d_state"),
        conv_width=config.integer("mamba_d_conv", default=4, minimum=2),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        in_bias=config.flag("mamba_proj_bias", default=False),
        out_bias=config.flag("projectors_bias", default=False),
        time_step_limit=time_step_limit(config.listing("time_step_limit", length=2, default=UNLIMITED)),
        dtype=dtype,
    )


def mamba_norm(config: Config, shape: Mamba2Shape, eps: float) -> GatedRMSNorm | None:
    if not config.flag("mamba_rms_norm", default=False):
        return None
    gate_first = not config.flag("mamba_norm_before_gate", default=True)
    return GatedRMSNorm(shape.inner, eps, shape.groups, gate_first)


def attention_shape(config: Config, dtype: torch.dtype) -> AttentionShape:
    bias = config.flag("attention_bias", default=False)
    return AttentionShape(
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        bias=bias,
        output_bias=bias,
    )
