"""gpt-oss: alternating windowed and full attention, with sinks; experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.kernels.experts import clamped
from weft.models import mxfp4
from weft.models.config import WINDOWED, Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame
from weft.models.layers.attention import Attention
from weft.models.layers.linear import Linear, only_once
from weft.models.layers.moe import ExpertLayer, Route, SparseMLP
from weft.models.layers.rotary import Rotary
from weft.models.model import Source
from weft.models.sharding import RankCut, current_shard

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


# Numbers with a common scale in MXFP4.
BLOCK = 32


class GptOss(DecoderModel):
    revision: ClassVar[int] = 2
    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"\.mlp\.router\.", ".mlp.gate."),)
    quantisations: ClassVar[tuple[str, ...]] = ("mxfp4",)

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        scaled = fields.get("rope_parameters") is not None or fields.get("rope_scaling")
        config = Config({**fields, **({} if scaled else {"rope_parameters": YARN})}, head_dim=64, sliding_window=128)
        config.only(hidden_act="silu")
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-5)
        bias = config.flag("attention_bias", default=True)
        layers, count = config.integer("num_hidden_layers"), config.integer("num_local_experts", "num_experts")
        names = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
        blocks = []
        for kind in config.layer_types(WINDOWED, default=names):
            window = config.window(kind == "sliding")
            shape = attention_shape(config, dtype, bias=bias, output_bias=bias, window=window, sinks=True)
            route = Route("route_top", k=config.experts_per_token(count))
            mlp = SparseMLP(Linear(hidden, count, bias=True), ClampedExperts(config, count), route)
            blocks.append(Block(Attention(shape), mlp, hidden, eps))
        decoder = frame(config, blocks, Rotary(config.rotary(theta=150000.0), dtype), eps=1e-5)
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=False))


class ClampedExperts(ExpertLayer):
    """Experts, filled from [experts, inputs, outputs], or from MXFP4 as [experts, outputs, inputs].

    Both formats interleave the outputs of gate and up; here all gates come first.
    """

    first_bias: nn.Parameter
    second_bias: nn.Parameter

    def __init__(self, config: Config, count: int) -> None:
        super().__init__()
        shard, hidden = current_shard(), config.integer("hidden_size")
        self.numbers, self.channels = shard.cut_experts(count, config.integer("intermediate_size"))
        held, inner = self.numbers.kept, self.channels.kept
        # An expert that all ranks share adds its bias once.
        self.bias_of = only_once(shard) if self.numbers.is_whole else None
        if config.fields.get("quantization_config") and inner % BLOCK and not self.channels.is_whole:
            raise ModelError(
                f"tensor_parallel is {shard.ranks} but must cut the {self.channels.size} channels of a quantised "
                f"expert at multiples of {BLOCK}; pass a smaller one"
            )
        self.first = nn.Parameter(torch.empty(held, 2 * inner, hidden), requires_grad=False)
        self.first_bias = nn.Parameter(torch.empty(held, 2 * inner), requires_grad=False)
        self.second = nn.Parameter(torch.empty(held, hidden, inner), requires_grad=False)
        self.second_bias = nn.Parameter(torch.empty(held, hidden), requires_grad=False)
        self.activation = clamped(
            alpha=config.number("swiglu_alpha", default=1.702),
            limit=config.number("swiglu_limit", default=7.0),
        )

    def initialise(self, generator: torch.Generator) -> None:
        for matrix in (self.first, self.second):
            matrix.normal_(std=matrix.shape[-1] ** -0.5, generator=generator)
        for bias in (self.first_bias, self.second_bias):
            bias.normal_(std=0.1, generator=generator)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        count, outer, hidden = self.first.shape
        inner = outer // 2
        # [experts, gate or up, inner, hidden] -> interleaved outputs
        turns = self.first.unflatten(1, (2, inner)).transpose(1, 2)
        both = self.channels.times(2)
        columns = turns.permute(0, 3, 1, 2)
        yield Source(prefix + "gate_up_proj", columns, shape=(count, hidden, outer), **self.cut_of(both, dim=2))
        bias_turns = self.first_bias.unflatten(1, (2, inner)).transpose(1, 2)
        yield Source(prefix + "gate_up_proj_bias", bias_turns, shape=(count, outer), **self.cut_of(both, dim=1))
        yield Source(prefix + "down_proj", self.second.transpose(1, 2), **self.cut_of(self.channels, dim=1))
        yield Source(prefix + "down_proj_bias", self.second_bias, self.bias_of, cut=self.numbers)
        if hidden % BLOCK == 0 and inner % BLOCK == 0:
            yield packed(prefix + "gate_up_proj", turns, (count, outer, hidden), **self.cut_of(both, dim=1))
            blocks = in_blocks(self.channels)
            yield packed(prefix + "down_proj", self.second, (count, hidden, inner), **self.cut_of(blocks, dim=2))


def packed(name: str, target: Tensor, shape: tuple[int, int, int], cut: RankCut, dim: int) -> Source:
    count, outputs, inputs = shape
    blocks = (count, outputs, inputs // BLOCK, BLOCK // 2)
    return Source(name + "_blocks", target, mxfp4.decode, blocks, (name + "_scales",), cut=cut, dim=dim)


def in_blocks(cut: RankCut) -> RankCut:
    """Return a cut of numbers as one of their blocks."""
    return RankCut(cut.size // BLOCK, tuple((start // BLOCK, end // BLOCK) for start, end in cut.ranges))
