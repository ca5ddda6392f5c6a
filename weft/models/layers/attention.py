"""Attention as a mixer: projections, norms and rotation around the paged kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.base.grid import CELL
from weft.kernels.activation import gated_product
from weft.kernels.attention import attention
from weft.kernels.batch import Batch
from weft.kernels.norm import LazyNorm
from weft.kernels.rotary import Rotation, rotate
from weft.memory.device.store import AttentionView, View
from weft.memory.spec import AttentionMemory
from weft.models.layers.linear import Linear, PackedLinear, parent_of
from weft.models.layers.norm import QueryKeyNorm
from weft.models.model import Mixer, Source

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What an attention layer is made of."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    window: int | None = None
    bias: bool = False  # of queries, keys and values
    output_bias: bool = False
    norm_eps: float | None = None  # None: queries and keys are not normed
    norm_zero_centred: bool = False
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False  # the output is multiplied by a sigmoid that `q_proj` brings along, head by head

    @property
    def inner(self) -> int:
        """What the output projection reads."""
        return self.heads * self.head_dim

    @property
    def sections(self) -> dict[str, int]:
        """What the input projection yields, by the names of the checkpoint: queries, keys, values; no gate yet."""
        keys = self.kv_heads * self.head_dim
        return {"q_proj": self.inner, "k_proj": keys, "v_proj": keys}


class Attention(Mixer):
    """Checkpoint names: q_proj, k_proj, v_proj, o_proj, and where present q_norm, k_norm, sinks.

    Where it does not project its input or its outcome itself, it is only ever asked to `mix_projected`.
    """

    def __init__(self, shape: AttentionShape, projects_in: bool = True, projects_out: bool = True) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.shape = shape
        self.scale = head_dim**-0.5 if shape.scale is None else shape.scale
        self.memory = AttentionMemory(kv_heads, head_dim, DTYPE_NAMES[shape.dtype], shape.window)
        self.qkv = projection(shape) if projects_in else None
        self.o_proj = Linear(shape.inner, shape.hidden, shape.output_bias) if projects_out else None
        self.qk_norm = (
            QueryKeyNorm(heads, kv_heads, head_dim, shape.norm_eps, shape.norm_zero_centred)
            if shape.norm_eps is not None
            else None
        )
        self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False) if shape.sinks else None

    def forward(
        self,
        x: Float[Tensor, "tokens hidden"] | LazyNorm,
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
    ) -> Float[Tensor, "*parts tokens hidden"]:
        assert self.qkv is not None
        assert self.o_proj is not None
        return self.o_proj.unsummed(self.mix_projected(self.qkv(x), rotation, batch, views))

    def mix_projected(
        self,
        flat: Float[Tensor, "tokens projected"],
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
        out: Float[Tensor, "tokens inner"] | None = None,
    ) -> Float[Tensor, "tokens inner"]:
        """`flat` may be a slice of a wider product. `out`, if given, is filled and returned; it may be one too."""
        projected = flat.unflatten(-1, (-1, self.shape.head_dim))
        view = views[self.index]
        assert isinstance(view, AttentionView)
        by_head = None if out is None else out.unflatten(-1, (-1, self.shape.head_dim))
        if batch.lanes is not None and batch.lanes.native:
            return self.mix_native(projected, rotation, batch, view, by_head).flatten(-2)
        mix = self.mix if batch.lanes is None else self.mix_lanes
        if not self.shape.gated:
            return mix(projected, rotation, batch, view, by_head).flatten(-2)
        mixed = mix(projected, rotation, batch, view).flatten(-2)
        gate = projected[:, self.shape.heads + 2 * self.shape.kv_heads :].flatten(-2)
        return gated_product(gate, mixed, torch.sigmoid, out)

    def mix(
        self,
        projected: Float[Tensor, "tokens projected head_dim"],
        rotation: Rotation | None,
        batch: Batch,
        view: AttentionView,
        out: Float[Tensor, "tokens heads head_dim"] | None = None,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        turning = heads + kv_heads
        queries_keys, values = projected[:, :turning], projected[:, turning : turning + kv_heads]
        if self.qk_norm is not None:
            queries_keys = self.qk_norm(queries_keys)
        if rotation is not None:
            queries_keys = rotate(queries_keys, rotation)
        queries, keys = queries_keys[:, :heads], queries_keys[:, heads:]
        return attention(queries, keys, values, batch, view, self.scale, self.shape.softcap, self.sinks, out)

    def mix_lanes(
        self,
        projected: Float[Tensor, "tokens projected head_dim"],
        rotation: Rotation | None,
        batch: Batch,
        view: AttentionView,
        out: Float[Tensor, "tokens heads head_dim"] | None = None,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """The same; all between projection and attention is one kernel, which also writes the pages."""
        from weft.kernels.cuda.attention import attend
        from weft.kernels.cuda.rotary import rotate_and_write

        weight, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        queries = rotate_and_write(projected, self.shape.heads, weight, eps, rotation, batch, view)
        return attend(queries, batch, view, self.scale, self.shape.softcap, self.sinks, out)

    def mix_native(
        self,
        projected: Float[Tensor, "tokens projected head_dim"],
        rotation: Rotation | None,
        batch: Batch,
        view: AttentionView,
        out: Float[Tensor, "tokens heads head_dim"] | None = None,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """The same, the gate included, in one kernel of the CPU."""
        from weft.kernels.native import attention as native

        shape = self.shape
        weight, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        reading = (batch, view, self.scale, shape.softcap, self.sinks)
        return native.mix(projected, shape.heads, weight, eps, rotation, *reading, gated=shape.gated, out=out)

    def warm(self) -> None:
        from weft.kernels.cuda.attention import warm
        from weft.kernels.cuda.flashinfer import Shape

        shape = self.shape
        heads = (shape.heads, shape.kv_heads, shape.head_dim)
        warm([Shape(shape.dtype, *heads, CELL, self.scale, shape.window, shape.softcap)])


def projection(shape: AttentionShape) -> PackedLinear:
    if shape.gated:
        return GatedProjection(shape.hidden, shape.sections, shape.bias, shape.heads)
    return PackedLinear(shape.hidden, shape.sections, shape.bias)


class GatedProjection(PackedLinear):
    """Queries, keys, values and then gates; in the checkpoint each head's gate follows its query inside `q_proj`."""

    def __init__(self, inputs: int, parts: dict[str, int], bias: bool, heads: int) -> None:
        super().__init__(inputs, {**parts, "gate": parts["q_proj"]}, bias)
        self.heads = heads

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        siblings = parent_of(prefix)
        for source in super().checkpoint_sources(prefix):
            part, leaf = source.name.removeprefix(siblings).split(".")
            if part not in ("q_proj", "gate"):
                yield source
                continue
            stored = (2 * source.target.shape[0], *source.target.shape[1:])
            take = partial(half_of_heads, heads=self.heads, second=part == "gate")
            yield Source(f"{siblings}q_proj.{leaf}", source.target, take, stored)


def half_of_heads(stored: Tensor, heads: int, second: bool) -> Tensor:
    """The first or second half of every head's rows."""
    return stored.unflatten(0, (heads, 2, -1))[:, int(second)].flatten(0, 1)
