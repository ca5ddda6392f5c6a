"""Kimi Delta Attention: the delta rule with a decay for each channel of a key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.device.store import RecurrentView, View
from weft.kernels.interface import Batch, Operations
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape
from weft.kernels.rotary import Rotation
from weft.memory.spec import Memory
from weft.models.layers.attention import DTYPE_NAMES
from weft.models.layers.causal_conv import CausalConv
from weft.models.layers.linear import Linear, OutputLinear, PackedLinear
from weft.models.layers.norm import RMSNorm
from weft.models.model import ProjectedMixer, Source, sources
from weft.models.sharding import RankCut, Shard, current_shard, side_by_side

# The convolution over queries, keys and values is stored as three.
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDeltaNetShape:
    """Sizes of a layer, and the rank whose heads are computed. Keys and values of a head have one size."""

    hidden: int
    heads: int
    head_dim: int
    conv_width: int
    eps: float
    dtype: torch.dtype
    shard: Shard = field(default_factory=current_shard)

    @property
    def head_cut(self) -> RankCut:
        return self.shard.cut(self.heads, "heads of the delta rule")

    @property
    def channels(self) -> RankCut:
        """Return the rank's channels of queries, of keys, of values and of gates."""
        return self.head_cut.times(self.head_dim)


class ChannelDeltaNet(ProjectedMixer):
    """Kimi Delta Attention. Decays and gates are projected twice, through `head_dim` channels: f_a_proj, f_b_proj,
    g_a_proj, g_b_proj.
    """

    projections = ("in_proj", "o_proj")

    def __init__(self, shape: ChannelDeltaNetShape) -> None:
        super().__init__()
        self.shape = shape
        self.head_cut, channels = shape.head_cut, shape.channels
        parts: dict[str, int | RankCut] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), channels)
        parts |= {"f_a_proj": shape.head_dim, "g_a_proj": shape.head_dim, "b_proj": self.head_cut}
        self.in_proj = PackedLinear(shape.hidden, parts)
        self.sections = [3 * channels.kept, shape.head_dim, shape.head_dim, self.head_cut.kept]
        self.conv_channels = side_by_side(channels, channels, channels)
        self.conv1d = CausalConv(self.conv_channels, shape.conv_width, bias=False, activation=True, parts=CONVOLUTIONS)
        self.f_b_proj, self.g_b_proj = (Linear(shape.head_dim, channels) for _ in range(2))
        # Decays stay float32 in models of any dtype: they are products of many factors.
        heads = self.head_cut.kept
        self.A, self.dt_bias = (
            nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
            for size in ((heads,), (heads, shape.head_dim))
        )
        self.o_norm = RMSNorm(shape.head_dim, shape.eps)
        self.state_dtype = "float32"
        self.o_proj = OutputLinear(channels, shape.hidden)

    def memory(self, operations: Operations) -> Memory:
        shape, heads = self.shape, self.head_cut.kept
        head, convolution = (shape.head_dim, shape.head_dim), (self.conv_channels.kept, shape.conv_width)
        sizes = ChannelDeltaShape(heads, *head, *convolution, self.state_dtype)
        return operations.channel_delta_memory(sizes, DTYPE_NAMES[shape.dtype])

    def keep_states_in(self, dtype: str) -> None:
        self.state_dtype = dtype

    def mix(
        self,
        projected: Float[Tensor, "tokens projected"],
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
        out: Float[Tensor, "tokens inner"] | None = None,
    ) -> Float[Tensor, "tokens inner"]:
        view, by_head = views[self.index], (self.head_cut.kept, self.shape.head_dim)
        assert isinstance(view, RecurrentView)
        mixed, decay, gate, strength = projected.split_with_sizes(self.sections, -1)
        query, key, value = (part.unflatten(-1, by_head) for part in self.conv1d(mixed, batch, view).chunk(3, dim=-1))
        step = self.f_b_proj(decay, batch).unflatten(-1, by_head)
        inputs = ChannelDeltaInputs(query, key, value, step, strength, self.A, self.dt_bias)
        y = self.o_norm(batch.operations.channel_delta(inputs, batch, view), batch)
        return batch.operations.gated_product(self.g_b_proj(gate, batch), y.flatten(-2), torch.sigmoid, out)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        shape = (1, 1, self.head_cut.kept, 1)
        yield Source(prefix + "A_log", self.A, minus_exp, shape, cut=self.head_cut, dim=2)
        channels = self.shape.channels
        yield Source(prefix + "dt_bias", self.dt_bias, shape=(channels.kept,), cut=channels)
        for name, child in self.named_children():
            yield from sources(child, f"{prefix}{name}.")

    def initialise(self, generator: torch.Generator) -> None:
        # Decays over one to some hundred tokens, so that heads and channels forget at different speeds.
        self.A.uniform_(-8.0, -0.5, generator=generator)
        self.dt_bias.uniform_(-4.0, 0.0, generator=generator)


def minus_exp(logarithm: Tensor) -> Tensor:
    return -logarithm.float().exp()
