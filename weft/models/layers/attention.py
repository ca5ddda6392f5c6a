"""Attention as a mixer: projections, norms and rotation around the paged kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.device.store import AttentionView, View
from weft.kernels.attention import AttentionForm, AttentionInputs
from weft.kernels.interface import Batch, Operations
from weft.kernels.rotary import Rotation
from weft.memory.spec import AttentionMemory, Memory
from weft.models.layers.linear import OutputLinear, PackedLinear, parent_of
from weft.models.layers.norm import AcrossHeadsNorm, QueryKeyNorm
from weft.models.model import ProjectedMixer, Source, sources
from weft.models.sharding import ALONE, RankCut, Shard, current_shard, side_by_side

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes and options of an attention layer, and the rank whose heads are computed."""

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
    norm_across_heads: bool = False  # one norm over all query heads and one over all key heads (OLMo)
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False  # the output is multiplied by a sigmoid of gates that `q_proj` also computes, head by head
    head_gates: bool = False  # each head's output is multiplied by a sigmoid of one gate, which `g_proj` computes
    fused: str | None = None  # the checkpoint's name of one matrix with queries, keys and values
    shard: Shard = field(default_factory=current_shard)

    @property
    def head_cut(self) -> RankCut:
        return self.shard.cut(self.heads, "attention heads")

    @property
    def kv_cut(self) -> RankCut:
        """Return the rank's key and value heads: those that its query heads read."""
        return self.shard.cut_or_repeat(self.kv_heads, "key and value heads")

    @property
    def local(self) -> AttentionShape:
        """Return the sizes of the rank's part."""
        return replace(self, heads=self.head_cut.kept, kv_heads=self.kv_cut.kept, shard=ALONE)

    @property
    def inner(self) -> RankCut:
        """Return the inputs of the output projection."""
        return self.head_cut.times(self.head_dim)

    @property
    def sections(self) -> dict[str, RankCut]:
        """Return the input projection's outputs by checkpoint name: queries, keys, values; without gates."""
        keys = self.kv_cut.times(self.head_dim)
        return {"q_proj": self.inner, "k_proj": keys, "v_proj": keys}


class Attention(ProjectedMixer):
    """Attention layer. Checkpoint names: q_proj, k_proj, v_proj, o_proj; some have q_norm, k_norm, g_proj or sinks."""

    projections = ("qkv", "o_proj")

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape.local
        self.head_cut = shape.head_cut
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, shape.head_dim
        self.form = AttentionForm(
            heads,
            kv_heads,
            head_dim,
            scale=head_dim**-0.5 if shape.scale is None else shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            norm_eps=shape.norm_eps or 0.0,
            gated=shape.gated or shape.head_gates,
        )
        self.qkv = projection(shape)
        self.o_proj = OutputLinear(shape.inner, shape.hidden, shape.output_bias)
        self.qk_norm = self.wide_norm = None
        if shape.norm_eps is not None and shape.norm_across_heads:
            self.wide_norm = AcrossHeadsNorm(shape.inner, shape.sections["k_proj"], shape.norm_eps)
        elif shape.norm_eps is not None:
            self.qk_norm = QueryKeyNorm(heads, kv_heads, head_dim, shape.norm_zero_centred)
        self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False) if shape.sinks else None
        self.page_dtype = DTYPE_NAMES[shape.dtype]

    def memory(self, operations: Operations) -> Memory:
        shape = self.shape
        return AttentionMemory(shape.kv_heads, shape.head_dim, self.page_dtype, shape.window)

    def keep_pages_in(self, dtype: str) -> None:
        self.page_dtype = dtype

    def mix(
        self,
        projected: Float[Tensor, "tokens projected"],
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
        out: Float[Tensor, "tokens inner"] | None = None,
    ) -> Float[Tensor, "tokens inner"]:
        view = views[self.index]
        assert isinstance(view, AttentionView)
        if self.wide_norm is not None:
            projected = self.wide_norm(projected, batch)
        norm = None if self.qk_norm is None else self.qk_norm.weight
        inputs = AttentionInputs(projected, self.form, norm, self.sinks, rotation)
        return batch.operations.attend(inputs, batch, view, out)

    def warm(self, operations: Operations) -> None:
        operations.warm_attention([self.form], self.shape.dtype)

    def prefix_members(self, operations: Operations) -> int | None:
        return None if self.form.window is not None else operations.prefix_members(self.form, self.shape.dtype)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        if self.sinks is not None:
            yield Source(prefix + "sinks", self.sinks, cut=self.head_cut)
        for name, child in self.named_children():
            yield from sources(child, f"{prefix}{name}.")


def projection(shape: AttentionShape) -> PackedLinear:
    if shape.gated:
        return GatedProjection(shape.hidden, shape.sections, shape.bias, shape.local.heads)
    if shape.head_gates:
        return HeadGatedProjection(shape)
    if shape.fused is not None:
        return PackedLinear(shape.hidden, {shape.fused: side_by_side(*shape.sections.values())}, shape.bias)
    return PackedLinear(shape.hidden, shape.sections, shape.bias)


class GatedProjection(PackedLinear):
    """Projection of queries, keys, values and then gates; a checkpoint's `q_proj` interleaves queries and gates by
    head.
    """

    def __init__(self, inputs: int, parts: dict[str, RankCut], bias: bool, heads: int) -> None:
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
            both = self.cuts["q_proj"].times(2)
            yield Source(f"{siblings}q_proj.{leaf}", source.target, shape=stored, cut=both, order=take)


class HeadGatedProjection(PackedLinear):
    """Projection of queries, keys, values and then gates, where all channels of a head have the gate of the head.

    The rows of gates are repeated, so that one matmul and the gating of attention compute them on every device.
    """

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape.hidden, {**shape.sections, "g_proj": shape.inner}, shape.bias)
        self.head_cut, self.head_dim = shape.head_cut, shape.head_dim
        if self.bias is not None:
            # Gates have none.
            self.bias.zero_()

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        siblings = parent_of(prefix)
        for source in super().checkpoint_sources(prefix):
            if not source.name.startswith(f"{siblings}g_proj."):
                yield source
            elif source.target.ndim > 1:
                stored = (self.head_cut.kept, source.target.shape[1])
                repeat = partial(repeated_rows, times=self.head_dim)
                yield Source(source.name, source.target, shape=stored, cut=self.head_cut, order=repeat)


def repeated_rows(stored: Tensor, times: int) -> Tensor:
    return stored.repeat_interleave(times, 0)


def half_of_heads(stored: Tensor, heads: int, second: bool) -> Tensor:
    """Return the first or second half of every head's rows."""
    half: Tensor = stored.unflatten(0, (heads, 2, -1))[:, int(second)]
    return half.flatten(0, 1)
