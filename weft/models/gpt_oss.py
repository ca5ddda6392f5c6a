"""gpt-oss: alternating windowed and full attention, with sinks; experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.kernels.experts import clamped
from weft.models.config import WINDOWED, Config
from weft.models.decoder import Block, DecoderModel, attention_shape, frame
from weft.models.layers.attention import Attention
from weft.models.layers.linear import Linear, only_once
from weft.models.layers.moe import ExpertLayer, Route, SparseMLP
from weft.models.layers.rotary import Rotary
from weft.models.model import Source, declared
from weft.models.sharding import current_shard

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(DecoderModel):
    revision: ClassVar[int] = 2
    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"\.mlp\.router\.", ".mlp.gate."),)

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
    """Experts whose gates and gated values are interleaved in a checkpoint; here all gates come first."""

    first_bias: nn.Parameter
    second_bias: nn.Parameter

    def __init__(self, config: Config, count: int) -> None:
        super().__init__()
        shard, hidden = current_shard(), config.integer("hidden_size")
        self.numbers, self.channels = shard.cut_experts(count, config.integer("intermediate_size"))
        held, inner = self.numbers.kept, self.channels.kept
        # An expert that all ranks share adds its bias once.
        self.bias_of = only_once(shard) if self.numbers.is_whole else None
        self.first = declared(held, 2 * inner, hidden)
        self.first_bias = nn.Parameter(torch.empty(held, 2 * inner), requires_grad=False)
        self.second = declared(held, hidden, inner)
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
        both = self.channels.times(2)
        turns = Source("", self.first, order=gates_first, output_dim=1)
        count, outer, hidden = self.first.shape
        name = prefix + "gate_up_proj"
        yield replace(turns, name=name, shape=(count, hidden, outer), transposed=True, **self.cut_of(both, dim=2))
        yield replace(turns, name=name + "_bias", target=self.first_bias, **self.cut_of(both, dim=1))
        name, shape = prefix + "down_proj", (count, outer // 2, hidden)
        yield Source(name, self.second, shape=shape, transposed=True, **self.cut_of(self.channels, dim=1))
        yield Source(name + "_bias", self.second_bias, self.bias_of, cut=self.numbers)


def gates_first(outputs: Tensor) -> Tensor:
    """Return outputs without their interleaving.

    >>> gates_first(torch.tensor([0, 10, 1, 11]))
    tensor([ 0,  1, 10, 11])
    """
    turns: Tensor = outputs.unflatten(0, (-1, 2))
    return turns.transpose(0, 1).flatten(0, 1)
