"""Nemotron-H: each block is one of Mamba2, attention without positions, MLP, or experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.device.store import View
from weft.kernels.interface import Batch
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Normed, Residual
from weft.models.config import Config, shown
from weft.models.decoder import Decoder, DecoderModel, grouped_route
from weft.models.layers.attention import Attention, AttentionShape
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear, SummandLinear
from weft.models.layers.mamba2 import UNLIMITED, Mamba2, Mamba2Shape, time_step_limit
from weft.models.layers.mlp import ACTIVATIONS, PlainMLP
from weft.models.layers.moe import Experts, Router
from weft.models.layers.norm import InnerNorm, RMSNorm
from weft.models.model import Layer, Mixer

# A letter each in `hybrid_override_pattern`, a word in `layers_block_type`.
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
WORDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


class NemotronH(DecoderModel):
    revision: ClassVar[int] = 1
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
    )
    ignored: ClassVar[tuple[str, ...]] = (*DecoderModel.ignored, r"^mtp\.")

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(fields)
        config.only(attention_bias=False, sliding_window=None)
        hidden, eps = config.integer("hidden_size"), config.number("layer_norm_epsilon", "norm_eps", default=1e-5)
        builders: dict[str, Callable[[Config, torch.dtype], nn.Module]] = {
            "mamba": mamba,
            "attention": attention,
            "mlp": mlp,
            "moe": SparseSquaredMLP,
        }
        decoder = Decoder(
            Embedding(config.integer("vocab_size"), hidden),
            [SingleBlock(builders[kind](config, dtype), hidden, eps) for kind in block_types(config)],
            RMSNorm(hidden, eps),
            rotary=None,
        )
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))


class SingleBlock(Layer):
    """Block with a single part: x + part(norm(x)). A block of other families corresponds to two of these."""

    def __init__(self, mixer: nn.Module, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.mixer = mixer
        self.remembers = isinstance(mixer, Mixer)

    def forward(self, stream: Residual, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> None:
        normed = stream.read(self.norm)
        stream.add(self.mixer(normed, rotation, batch, views) if self.remembers else self.mixer(normed, batch))


def block_types(config: Config) -> list[str]:
    """Return block types from a list of words or, in older configurations, a string with a letter per block."""
    words = config.listing("layers_block_type", "layer_types", default=[])
    found = listed_blocks(config, "layers_block_type", words, "hybrid_override_pattern")
    if not found:
        raise ModelError(
            "config.json must have layers_block_type or hybrid_override_pattern for this architecture, but has none"
        )
    if config.integer("num_hidden_layers", default=len(found)) != len(found):
        raise ModelError(
            f"config.json: num_hidden_layers must be {len(found)}, the number of listed blocks, got "
            f"{config.fields['num_hidden_layers']}"
        )
    return found


def listed_blocks(config: Config, field: str, words: list[Any], pattern: str) -> list[str]:
    """Return the block types that a list of words or a string of letters names, and both if they agree."""
    letters = config.fields.get(pattern) or ""
    if not isinstance(letters, str):
        raise ModelError(f"config.json: {pattern} must be a string, got {shown(letters)}")
    by_word, by_letter = config.kinds(field, words, WORDS), config.kinds(pattern, letters, LETTERS)
    if by_word and by_letter and by_word != by_letter:
        raise ModelError(f"config.json: {field} and {pattern} must name the same blocks; remove one of them")
    return by_word or by_letter


def mamba(config: Config, dtype: torch.dtype) -> Mamba2:
    bias = config.flag("use_bias", default=False)
    shape = Mamba2Shape(
        hidden=config.integer("hidden_size"),
        heads=config.integer("mamba_num_heads"),
        head_dim=config.integer("mamba_head_dim"),
        groups=config.integer("mamba_n_groups", "n_groups"),
        state=config.integer("ssm_state_size"),
        conv_width=config.integer("mamba_d_conv", "conv_kernel", default=4, minimum=2),
        conv_bias=config.flag("mamba_conv_bias", "use_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        # Not time_step_min: that only shaped the initial weights.
        time_step_limit=time_step_limit(
            config.listing("mamba_dt_limit", "time_step_limit", length=2, default=UNLIMITED)
        ),
        dtype=dtype,
    )
    config.choice("mamba_hidden_act", among=("silu",), default="silu")
    eps = config.number("layer_norm_epsilon", "norm_eps", default=1e-5)
    return Mamba2(shape, InnerNorm(shape.inner, eps, shape.groups, gate_first=True))


def attention(config: Config, dtype: torch.dtype) -> Attention:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return Attention(
        AttentionShape(
            hidden=hidden,
            heads=heads,
            kv_heads=config.kv_heads,
            head_dim=config.integer("head_dim", "attention_head_dim", default=max(1, hidden // heads)),
            dtype=dtype,
        )
    )


def mlp(config: Config, dtype: torch.dtype, size: str = "intermediate_size", into_stream: bool = True) -> PlainMLP:
    activation = config.choice("mlp_hidden_act", among=ACTIVATIONS, default="relu2")
    bias = config.flag("mlp_bias", default=False)
    return PlainMLP(config.integer("hidden_size"), config.integer(size), activation, bias, into_stream)


class SparseSquaredMLP(Layer):
    """Experts without gates, possibly in a smaller space between two projections, plus a shared MLP."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, count = config.integer("hidden_size"), config.integer("n_routed_experts")
        latent = config.integer("moe_latent_size", default=None)
        bias = config.flag("mlp_bias", default=False)
        self.gate = Router(hidden, count)
        self.fc1_latent_proj = None if latent is None else Linear(hidden, latent, bias)
        self.fc2_latent_proj = None if latent is None else SummandLinear(latent, hidden, bias)
        self.experts = Experts(
            count,
            latent or hidden,
            config.integer("moe_intermediate_size"),
            config.choice("mlp_hidden_act", among=ACTIVATIONS, default="relu2"),
            ("up_proj", "down_proj"),
        )
        self.shared_experts = mlp(config, dtype, "moe_shared_expert_intermediate_size", into_stream=False)
        self.route = grouped_route(config, count)

    def forward(self, x: Normed, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        x = batch.operations.rows_of(x)
        routing = self.route(batch.operations, self.gate(x, batch), bias=self.gate.e_score_correction_bias)
        if self.fc1_latent_proj is None:
            routed = self.experts.forward(x, routing, batch)
        else:
            assert self.fc2_latent_proj is not None
            latent = self.experts(self.fc1_latent_proj(x, batch), routing, batch)
            routed = self.fc2_latent_proj.forward(latent, batch)
        return batch.operations.add(routed, self.shared_experts(x, batch))
