"""The Gated DeltaNet mixer of Qwen3-Next and Qwen3.5, with both layouts of its projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.device.store import RecurrentView, View
from weft.kernels.interface import Batch, Operations
from weft.kernels.recurrent import DeltaInputs, DeltaShape
from weft.kernels.rotary import Rotation
from weft.memory.spec import Memory
from weft.models.layers.attention import DTYPE_NAMES
from weft.models.layers.causal_conv import CausalConv
from weft.models.layers.linear import OutputLinear, PackedLinear
from weft.models.layers.norm import GatedRMSNorm
from weft.models.model import ProjectedMixer, Source, sources
from weft.models.sharding import ALONE, RankCut, Shard, current_shard, side_by_side


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaShape:
    hidden: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_width: int
    eps: float
    dtype: torch.dtype
    most_correction: float = 1.0  # maximum rate at which a key's content is corrected; the minimum is zero
    shard: Shard = field(default_factory=current_shard)

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"config.json: linear_num_value_heads {self.value_heads} must be a multiple of "
                f"linear_num_key_heads {self.key_heads}"
            )

    @property
    def head_cut(self) -> RankCut:
        """Return the rank's value heads."""
        return self.shard.cut(self.value_heads, "value heads of the gated delta rule")

    @property
    def key_cut(self) -> RankCut:
        """Return the rank's key heads: those that its value heads read. Several ranks may have the same one."""
        return self.shard.cut_or_repeat(self.key_heads, "key heads of the gated delta rule")

    @property
    def local(self) -> GatedDeltaShape:
        """Return the sizes of the rank's part."""
        return replace(self, key_heads=self.key_cut.kept, value_heads=self.head_cut.kept, shard=ALONE)

    @property
    def keys(self) -> RankCut:
        return self.key_cut.times(self.key_dim)

    @property
    def values(self) -> RankCut:
        return self.head_cut.times(self.value_dim)

    @property
    def conv_channels(self) -> RankCut:
        return side_by_side(self.keys, self.keys, self.values)


class InterleavedLinear(PackedLinear):
    """Qwen3-Next's projections: the checkpoint sorts rows by key head, this layer by output."""

    def __init__(self, inputs: int, parts: dict[str, RankCut], key_heads: int, sections: dict[str, list[int]]) -> None:
        super().__init__(inputs, parts)
        self.key_heads = key_heads
        self.sections = sections

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        for source in super().checkpoint_sources(prefix):
            sections = self.sections[source.name.split(".")[-2]]
            sort = partial(sorted_by_yield, key_heads=self.key_heads, sections=sections)
            yield replace(source, order=sort)


def sorted_by_yield(
    weight: Shaped[Tensor, rows * inputs], key_heads: int, sections: list[int]
) -> Shaped[Tensor, rows * inputs]:
    """Regroup rows by section. The checkpoint stores them head by head, and each head has all `sections`."""
    by_head = weight.unflatten(0, (key_heads, -1))
    return torch.cat([part.flatten(0, 1) for part in by_head.split(sections, dim=1)])


def interleaved_projection(shape: GatedDeltaShape) -> InterleavedLinear:
    """Return `in_proj_qkvz` and `in_proj_ba`, stored head by head: a key head's outputs, then its value heads'."""
    local = shape.local
    shared = local.value_heads // local.key_heads
    values = shared * shape.value_dim
    by_head = {"in_proj_qkvz": [shape.key_dim, shape.key_dim, values, values], "in_proj_ba": [shared, shared]}
    keys = RankCut.whole(shape.key_dim)
    parts = {"in_proj_qkvz": (keys, keys, shape.value_dim, shape.value_dim), "in_proj_ba": (1, 1)}
    cuts = {name: interleaved_cut(shape, sections) for name, sections in parts.items()}
    return InterleavedLinear(shape.hidden, cuts, local.key_heads, by_head)


def interleaved_cut(shape: GatedDeltaShape, sections: tuple[RankCut | int, ...]) -> RankCut:
    """Return the rank's rows where each key head has all sections: a cut of its own, or rows per value head."""
    shared, [(first, end)] = shape.value_heads // shape.key_heads, shape.head_cut.ranges

    def own(key_head: int, section: RankCut | int) -> RankCut:
        if isinstance(section, RankCut):
            mine = key_head in range(*shape.key_cut.ranges[0])
            return section if mine else RankCut(section.size, ())
        low, high = (min(max(edge - key_head * shared, 0), shared) for edge in (first, end))
        return RankCut(shared, ((low, high),) if low < high else ()).times(section)

    return side_by_side(*(own(key_head, section) for key_head in range(shape.key_heads) for section in sections))


def split_projection(shape: GatedDeltaShape) -> PackedLinear:
    """Return `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, each sorted by output."""
    parts = [shape.conv_channels, shape.values, shape.head_cut, shape.head_cut]
    return PackedLinear(shape.hidden, dict(zip(["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], parts)))


class GatedDeltaNet(ProjectedMixer):
    """Gated DeltaNet mixer. `projection`, from a function above, computes q, k, v, gates, write strengths and decays.

    `convolutions` are the names of the parts in which a checkpoint may store the convolution.
    """

    def __init__(self, shape: GatedDeltaShape, projection: PackedLinear, convolutions: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.shape = local = shape.local
        self.head_cut = shape.head_cut
        self.in_proj = projection
        self.conv1d = CausalConv(shape.conv_channels, shape.conv_width, bias=False, activation=True, parts=convolutions)
        # A and the bias of dt stay float32 in models of any dtype: decays are products of many factors.
        self.A, self.dt_bias = (
            nn.Parameter(torch.empty(local.value_heads, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )
        self.sections = [shape.conv_channels.kept, shape.values.kept, local.value_heads, local.value_heads]
        self.conv_sections = [shape.keys.kept, shape.keys.kept, shape.values.kept]
        self.norm = GatedRMSNorm(shape.value_dim, shape.eps)
        self.state_dtype = "float32"
        self.out_proj = OutputLinear(shape.values, shape.hidden)

    def memory(self, operations: Operations) -> Memory:
        shape = self.shape
        keys, values = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
        sizes = DeltaShape(*keys, *values, shape.conv_channels.kept, shape.conv_width, self.state_dtype)
        return operations.gated_delta_memory(sizes, DTYPE_NAMES[shape.dtype])

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
        shape, view = self.shape, views[self.index]
        assert isinstance(view, RecurrentView)
        heads = shape.value_heads
        mixed, gate, strength, step = projected.split_with_sizes(self.sections, -1)
        mixed = self.conv1d(mixed, batch, view)
        query, key, value = mixed.split_with_sizes(self.conv_sections, -1)
        inputs = DeltaInputs(
            query.view(-1, shape.key_heads, shape.key_dim),
            key.view(-1, shape.key_heads, shape.key_dim),
            value.view(-1, heads, shape.value_dim),
            step,
            strength,
            self.A,
            self.dt_bias,
            shape.most_correction,
        )
        y = batch.operations.gated_delta(inputs, batch, view)
        by_head = None if out is None else out.unflatten(-1, (heads, shape.value_dim))
        normed: Tensor = self.norm(y, gate.unflatten(-1, (heads, shape.value_dim)), batch, by_head)
        return normed.flatten(-2)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield Source(prefix + "A_log", self.A, lambda logarithm: -logarithm.float().exp(), cut=self.head_cut)
        yield Source(prefix + "dt_bias", self.dt_bias, cut=self.head_cut)
        for name, child in self.named_children():
            yield from sources(child, f"{prefix}{name}.")

    def initialise(self, generator: torch.Generator) -> None:
        # Decays over one to some hundred tokens, so that heads forget at different speeds.
        self.A.uniform_(-8.0, -0.5, generator=generator)
        self.dt_bias.uniform_(-4.0, 0.0, generator=generator)
