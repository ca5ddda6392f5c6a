"""Structure that families share: embedding, blocks, final norm, head.

Families define the blocks; this file connects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.device.store import View
from weft.kernels.interface import Batch
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Residual
from weft.models.config import Config, shown
from weft.models.layers.attention import AttentionShape
from weft.models.layers.embedding import Embedding, VocabularyHead
from weft.models.layers.mamba2 import UNLIMITED, Mamba2Shape, head_dim_of, time_step_limit
from weft.models.layers.mlp import ACTIVATIONS, GatedMLP
from weft.models.layers.moe import Route
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary, RotaryByKind
from weft.models.model import CausalModel, Layer
from weft.models.sharding import current_shard


class Block(Layer):
    """Standard block: x + mixer(norm(x)), then x + mlp(norm(x)), under the names of most checkpoints.

    `factor` multiplies what is added (Granite).
    """

    def __init__(
        self,
        mixer: nn.Module,
        mlp: nn.Module,
        hidden: int,
        eps: float,
        zero_centred: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.factor = factor
        self.input_layernorm = RMSNorm(hidden, eps, zero_centred)
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(hidden, eps, zero_centred)
        self.mlp = mlp

    def forward(self, stream: Residual, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> None:
        stream.add(self.self_attn(stream.read(self.input_layernorm), rotation, batch, views), self.factor)
        stream.add(self.mlp(stream.read(self.post_attention_layernorm), batch), self.factor)


class SandwichBlock(Layer):
    """Block with norms before and after both halves: x + norm(mixer(norm(x))), then x + norm(mlp(norm(x))).

    Without `norms_after`, it has only those before, under the same names.
    """

    def __init__(
        self,
        mixer: nn.Module,
        mlp: nn.Module,
        hidden: int,
        eps: float,
        zero_centred: bool = False,
        norms_after: bool = True,
    ) -> None:
        super().__init__()
        self.self_attn = mixer
        self.mlp = mlp
        self.input_layernorm = RMSNorm(hidden, eps, zero_centred)
        self.post_attention_layernorm = RMSNorm(hidden, eps, zero_centred) if norms_after else None
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps, zero_centred)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, zero_centred) if norms_after else None

    def forward(self, stream: Residual, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> None:
        mixed = self.self_attn(stream.read(self.input_layernorm), rotation, batch, views)
        stream.add(mixed, norm=self.post_attention_layernorm)
        stream.add(self.mlp(stream.read(self.pre_feedforward_layernorm), batch), norm=self.post_feedforward_layernorm)


class PostNormBlock(Layer):
    """Block x + norm(mixer(x)), then x + norm(mlp(x)): it norms what it adds, not what it reads (OLMo)."""

    def __init__(self, mixer: nn.Module, mlp: nn.Module, hidden: int, eps: float) -> None:
        super().__init__()
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)

    def forward(self, stream: Residual, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> None:
        stream.add(self.self_attn(stream.total(), rotation, batch, views), norm=self.post_attention_layernorm)
        stream.add(self.mlp(stream.total(), batch), norm=self.post_feedforward_layernorm)


class Decoder(Layer):
    """Stack of blocks. Checkpoint names: embed_tokens, layers.N, norm."""

    # Called after each block of a step, if there is one.
    passed: Callable[[], None] | None = None

    def __init__(
        self, embedding: Embedding, layers: Sequence[nn.Module], norm: RMSNorm, rotary: Rotary | RotaryByKind | None
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotary = rotary

    def forward(self, batch: Batch, views: tuple[View, ...]) -> Float[Tensor, "tokens hidden"]:
        stream = batch.operations.residual(self.embed_tokens(batch))
        rotations = self.rotations(batch)
        for layer, rotation in zip(self.walk(), rotations):
            layer(stream, rotation, batch, views)
        return stream.finish(self.norm)

    def rotations(self, batch: Batch) -> Sequence[Rotation | None]:
        """Return the rotation of every layer. Layers with the same one share it."""
        if isinstance(self.rotary, RotaryByKind):
            return self.rotary.forward(batch)
        return [None if self.rotary is None else self.rotary(batch)] * len(self.layers)

    def walk(self) -> Iterator[nn.Module]:
        """Yield the blocks of a step in their order."""
        for layer in self.layers:
            yield layer
            if self.passed is not None:
                self.passed()


class DecoderModel(CausalModel):
    """A decoder and its head, which may be the embedding itself. Checkpoint names: model, lm_head."""

    def __init__(self, config: Config, model: Decoder, tied: bool) -> None:
        super().__init__()
        self.vocab_size = config.integer("vocab_size")
        self.model = model
        self.shard = current_shard()
        hidden = config.integer("hidden_size")
        self.lm_head: VocabularyHead | None = None if tied else VocabularyHead(hidden, self.vocab_size, self.shard)
        model.embed_tokens.tied = tied
        self.mixers()

    @property
    def tied(self) -> bool:
        return self.lm_head is None

    def untie(self) -> None:
        embedding = self.model.embed_tokens
        self.lm_head = VocabularyHead(embedding.size, self.vocab_size, self.shard).to(embedding.weight)
        embedding.tied = False

    def forward(self, batch: Batch, views: tuple[View, ...]) -> Float[Tensor, "tokens hidden"]:
        return self.model.forward(batch, views)

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        head = self.model.embed_tokens.scores if self.lm_head is None else self.lm_head.forward
        return batch.operations.gather_ranks(head(hidden, batch), self.vocab_size)

    def first_logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch, count: int) -> Float[Tensor, "n count"]:
        """Return the logits of the first tokens of the vocabulary. Where it can, it reads no others' weights."""
        head = self.model.embed_tokens.head_weights if self.lm_head is None else self.lm_head.weights
        first = head.first(count)
        return self.logits(hidden, batch)[:, :count] if first is None else batch.operations.linear(hidden, first)


def attention_shape(config: Config, dtype: torch.dtype, **more: Any) -> AttentionShape:
    """Return the attention sizes that every configuration has, with a family's additions."""
    return AttentionShape(
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        **more,
    )


def mamba2_shape(config: Config, dtype: torch.dtype, inner: int, out_bias: bool) -> Mamba2Shape:
    """Return the sizes of a Mamba2 layer by the names of Falcon-H1 and Granite; `inner` is the scan's channels."""
    heads = config.integer("mamba_n_heads")
    head_dim = head_dim_of(inner, heads)
    if config.fields.get("mamba_d_head") not in (None, "auto", head_dim):
        raise ModelError(
            f"config.json: mamba_d_head must be {head_dim}, the inner size {inner} over mamba_n_heads {heads}, got "
            f"{shown(config.fields['mamba_d_head'])}"
        )
    return Mamba2Shape(
        hidden=config.integer("hidden_size"),
        heads=heads,
        head_dim=head_dim,
        groups=config.integer("mamba_n_groups", default=1),
        state=config.integer("mamba_d_state"),
        conv_width=config.integer("mamba_d_conv", default=4, minimum=2),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        in_bias=config.flag("mamba_proj_bias", default=False),
        out_bias=out_bias,
        time_step_limit=time_step_limit(config.listing("time_step_limit", length=2, default=UNLIMITED)),
        dtype=dtype,
    )


def gated_mlp(config: Config, bias: bool = False) -> GatedMLP:
    activation = config.choice("hidden_act", "hidden_activation", among=ACTIVATIONS, default="silu")
    return GatedMLP(config.integer("hidden_size"), config.integer("intermediate_size"), activation, bias)


def grouped_route(config: Config, count: int, scaling: float = 1.0) -> Route:
    """Return a router that scores `count` experts independently and chooses from the best groups only.

    `scaling` is the family's default of the factor of their weights.
    """
    groups = config.integer("n_group", "num_expert_group", default=1)
    kept = config.integer("topk_group", default=1)
    if count % groups or kept > groups:
        raise ModelError(
            f"config.json: n_group must divide the {count} experts and be at least topk_group {kept}, got {groups}"
        )
    return Route(
        "route_sigmoid",
        k=config.experts_per_token(count // groups * kept),
        groups=groups,
        kept_groups=kept,
        renormalise=config.flag("norm_topk_prob", "moe_renormalize", default=True),
        scaling=config.number("routed_scaling_factor", default=scaling),
    )


def frame(
    config: Config,
    layers: Sequence[nn.Module],
    rotary: Rotary | RotaryByKind | None,
    scale: float = 1.0,
    zero_centred: bool = False,
    eps: float = 1e-6,
) -> Decoder:
    """Return a decoder around `layers`, by the usual names of a configuration's fields."""
    hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=eps)
    embedding = Embedding(config.integer("vocab_size"), hidden, scale)
    return Decoder(embedding, layers, RMSNorm(hidden, eps, zero_centred), rotary)
