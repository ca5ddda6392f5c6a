"""Everything between the two projections of an attention layer: norms of heads, rotation, pages, attention, gate.

A GPU and the C++ kernels of a CPU each do most of it in one kernel, so the whole stretch is one operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from weft.base.grid import CELL
from weft.kernels.activation import gated_product
from weft.kernels.attention import attention
from weft.kernels.batch import Batch
from weft.kernels.norm import rms_norm_heads
from weft.kernels.rotary import Rotation, rotate
from weft.memory.device.store import AttentionView


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The constants of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    norm_eps: float = 0.0  # of the norms of queries and keys, where the layer has them
    gated: bool = False  # gates follow the values in the projection; their sigmoid multiplies the output


def attend(
    projected: Float[Tensor, "tokens projected"],
    form: AttentionForm,
    norm: Float[Tensor, "normed head_dim"] | None,
    sinks: Float[Tensor, " heads"] | None,
    rotation: Rotation | None,
    batch: Batch,
    view: AttentionView,
    out: Float[Tensor, "tokens inner"] | None = None,
) -> Float[Tensor, "tokens inner"]:
    """Attend with projected queries, keys, values and, if the layer is gated, gates; they lie side by side.

    `norm` holds the weights of the norms of queries and then of keys, a line each head. `projected` may be a slice of a
    wider matrix, and so may `out`, which is filled and returned if it is given.
    """
    heads = projected.unflatten(-1, (-1, form.head_dim))
    by_head = None if out is None else out.unflatten(-1, (-1, form.head_dim))
    if batch.lanes is not None and batch.lanes.native:
        return _in_cpp(heads, form, norm, sinks, rotation, batch, view, by_head).flatten(-2)
    mix = _plain if batch.lanes is None else _on_gpu
    if not form.gated:
        return mix(heads, form, norm, sinks, rotation, batch, view, by_head).flatten(-2)
    mixed = mix(heads, form, norm, sinks, rotation, batch, view, None).flatten(-2)
    gate = heads[:, form.heads + 2 * form.kv_heads :].flatten(-2)
    return gated_product(gate, mixed, torch.sigmoid, out)


def _plain(
    projected: Float[Tensor, "tokens projected head_dim"],
    form: AttentionForm,
    norm: Tensor | None,
    sinks: Tensor | None,
    rotation: Rotation | None,
    batch: Batch,
    view: AttentionView,
    out: Tensor | None,
) -> Float[Tensor, "tokens heads head_dim"]:
    turning = form.heads + form.kv_heads
    queries_keys, values = projected[:, :turning], projected[:, turning : turning + form.kv_heads]
    if norm is not None:
        queries_keys = rms_norm_heads(queries_keys, norm, form.norm_eps)
    if rotation is not None:
        queries_keys = rotate(queries_keys, rotation)
    queries, keys = queries_keys[:, : form.heads], queries_keys[:, form.heads :]
    return attention(queries, keys, values, batch, view, form.scale, form.softcap, sinks, out)


def _on_gpu(
    projected: Float[Tensor, "tokens projected head_dim"],
    form: AttentionForm,
    norm: Tensor | None,
    sinks: Tensor | None,
    rotation: Rotation | None,
    batch: Batch,
    view: AttentionView,
    out: Tensor | None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """One kernel norms, rotates and writes the pages."""
    from weft.kernels.cuda import attention as kernels
    from weft.kernels.cuda.rotary import rotate_and_write

    queries = rotate_and_write(projected, form.heads, norm, form.norm_eps, rotation, batch, view)
    return kernels.attend(queries, batch, view, form.scale, form.softcap, sinks, out)


def _in_cpp(
    projected: Float[Tensor, "tokens projected head_dim"],
    form: AttentionForm,
    norm: Tensor | None,
    sinks: Tensor | None,
    rotation: Rotation | None,
    batch: Batch,
    view: AttentionView,
    out: Tensor | None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """One kernel for all of it, the gate included."""
    from weft.kernels.native import attention as native

    reading = (batch, view, form.scale, form.softcap, sinks)
    return native.mix(projected, form.heads, norm, form.norm_eps, rotation, *reading, gated=form.gated, out=out)


def warm(form: AttentionForm, dtype: torch.dtype) -> None:
    """Compile what attention of this form needs on a GPU, so that no step waits for it."""
    from weft.kernels.cuda import attention as kernels
    from weft.kernels.cuda.flashinfer import Shape

    heads = (form.heads, form.kv_heads, form.head_dim)
    kernels.warm([Shape(dtype, *heads, CELL, form.scale, form.window, form.softcap)])
