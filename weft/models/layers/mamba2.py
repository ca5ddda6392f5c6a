"""The Mamba2 mixer: a convolution, a scan with scalar decay per head, a gate. The scan itself is an operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.device.store import RecurrentView, View
from weft.kernels.interface import Batch, Operations
from weft.kernels.recurrent import UNLIMITED, SsdInputs, SsdShape
from weft.kernels.rotary import Rotation
from weft.memory.spec import Memory
from weft.models.config import shown
from weft.models.layers.attention import DTYPE_NAMES
from weft.models.layers.causal_conv import CausalConv
from weft.models.layers.linear import Linear, OutputLinear
from weft.models.model import ProjectedMixer, Source, sources
from weft.models.sharding import ALONE, RankCut, Shard, current_shard, side_by_side

__all__ = ["UNLIMITED", "Mamba2", "Mamba2Shape", "head_dim_of", "time_step_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    conv_width: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    time_step_limit: tuple[float, float]
    dtype: torch.dtype
    shard: Shard = field(default_factory=current_shard)

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(f"config.json: the {self.heads} heads must be a multiple of the {self.groups} groups")

    @property
    def head_cut(self) -> RankCut:
        return self.shard.cut(self.heads, "Mamba2 heads")

    @property
    def group_cut(self) -> RankCut:
        """Return the rank's groups: those that its heads read. Several ranks may have the same one."""
        return self.shard.cut_or_repeat(self.groups, "Mamba2 groups")

    @property
    def local(self) -> Mamba2Shape:
        """Return the sizes of the rank's part."""
        return replace(self, heads=self.head_cut.kept, groups=self.group_cut.kept, shard=ALONE)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.conv_cut.size

    @property
    def conv_cut(self) -> RankCut:
        """Return the rank's part of the convolution's channels: x, B, C."""
        width = self.group_cut.times(self.state)
        return side_by_side(self.head_cut.times(self.head_dim), width, width)

    @property
    def sections(self) -> list[int]:
        """Return the input projection's outputs: gate, convolution input (x, B, C), time step."""
        return [self.inner, self.conv_channels, self.heads]


def head_dim_of(inner: int, heads: int) -> int:
    if inner % heads:
        raise ModelError(f"config.json: Mamba2's inner size {inner} must be a multiple of its {heads} heads")
    return inner // heads


def time_step_limit(limit: list[Any]) -> tuple[float, float]:
    """Return the bounds of the time step; JSON may spell infinity as an object.

    >>> time_step_limit([0.0, {"__float__": "Infinity"}])
    (0.0, inf)
    """
    try:
        low, high = (float(bound["__float__"] if isinstance(bound, dict) else bound) for bound in limit)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: time_step_limit must be two numbers, got {shown(limit)}") from error
    if not 0 <= low <= high:
        raise ModelError(f"config.json: time_step_limit must be two increasing numbers from 0, got {shown(limit)}")
    return low, high


class Mamba2(ProjectedMixer):
    """Mamba2 mixer. `norm` combines the scan's output with the gate; without it, they are multiplied."""

    def __init__(self, shape: Mamba2Shape, norm: nn.Module | None) -> None:
        super().__init__()
        self.shape = shape.local
        self.head_cut = heads = shape.head_cut
        inner = heads.times(shape.head_dim)
        self.in_proj = Linear(shape.hidden, side_by_side(inner, shape.conv_cut, heads), shape.in_bias)
        self.conv1d = CausalConv(shape.conv_cut, shape.conv_width, shape.conv_bias, activation=True)
        # A, the bias of dt and D stay float32 in models of any dtype: decays are products of many factors.
        self.A, self.dt_bias, self.D = (
            nn.Parameter(torch.empty(heads.kept, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )
        self.norm = norm
        self.state_dtype = "float32"
        self.out_proj = OutputLinear(inner, shape.hidden, shape.out_bias)

    def memory(self, operations: Operations) -> Memory:
        shape = self.shape
        convolution = (shape.conv_channels, shape.conv_width)
        sizes = SsdShape(shape.heads, shape.head_dim, shape.state, shape.groups, *convolution, self.state_dtype)
        return operations.ssd_memory(sizes, DTYPE_NAMES[shape.dtype])

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
        gate, mixed, step = projected.split_with_sizes(shape.sections, -1)
        mixed = self.conv1d(mixed, batch, view)
        width = shape.groups * shape.state
        inner, write, read = mixed.split_with_sizes([shape.inner, width, width], -1)
        inputs = SsdInputs(
            inner.view(-1, shape.heads, shape.head_dim),
            step,
            self.A,
            write.view(-1, shape.groups, shape.state),
            read.view(-1, shape.groups, shape.state),
            self.D,
            self.dt_bias,
            shape.time_step_limit,
            gate if self.norm is None else None,
        )
        by_head = None if out is None or self.norm is not None else out.unflatten(-1, (shape.heads, shape.head_dim))
        y = batch.operations.ssd(inputs, batch, view, by_head).flatten(-2)
        return y if self.norm is None else self.norm(y, gate, batch, out)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield Source(prefix + "A_log", self.A, lambda logarithm: -logarithm.float().exp(), cut=self.head_cut)
        yield Source(prefix + "dt_bias", self.dt_bias, cut=self.head_cut)
        yield Source(prefix + "D", self.D, cut=self.head_cut)
        for name, child in self.named_children():
            yield from sources(child, f"{prefix}{name}.")

    def initialise(self, generator: torch.Generator) -> None:
        # Decays over one to some hundred tokens, so that heads forget at different speeds.
        self.A.uniform_(-8.0, -0.5, generator=generator)
        self.dt_bias.uniform_(-4.0, 0.0, generator=generator)
        self.D.normal_(1.0, 0.1, generator=generator)
