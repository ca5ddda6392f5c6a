"""Attention of a decode-only step, one call per layer: norm, rotation, new keys and values to their pages, and reading.

What depends on the step but not on the layer (pages, division of the work, buffers for sums) is decided once and
kept with the batch.
"""

from __future__ import annotations

import ctypes
from struct import Struct

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.interface import Batch
from weft.kernels.native.calls import call, room
from weft.kernels.native.library import DTYPES, address
from weft.kernels.native.limits import MOST_SIZE
from weft.kernels.rotary import Rotation

LAYER = Struct("11P9q3f")
# Kinds of codes in C.
CODE_KINDS = {torch.float8_e4m3fn: 0, torch.int8: 1}
# Floats of a vector: lines of sums are whole vectors.
VECTOR = 16
# Positions with separate sums, so that several threads can read one long row.
STRETCH = 512
# Tokens seen times values of all heads below which waking other threads costs more than it saves.
LEAST_SHARED = 1 << 17


class AttentionStepFields(ctypes.Structure):
    """A step in C; attention.h has the same fields."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("start", "write_page", "first_position", "bounds", "pages", "scratch")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "kv_heads", "head_dim", "cell", "window")),
        *((name, ctypes.c_long) for name in ("first_stretch", "stretches", "stretch_cells", "blocks", "threads")),
    ]


def mix(
    projected: Float[Tensor, "rows projected head_dim"],
    heads: int,
    weight: Float[Tensor, "turning head_dim"] | None,
    eps: float,
    rotation: Rotation | None,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    gated: bool = False,
    out: Float[Tensor, "rows heads head_dim"] | None = None,
) -> Float[Tensor, "rows heads head_dim"]:
    """Attend. `projected` holds the query heads, then the key heads, then the value heads and, if `gated`, the gates.

    `out`, if given, is filled and returned; its rows need not be adjacent.
    """
    rows, _, head_dim = projected.shape
    key = ("native attention", view.window, heads, *view.keys.shape[2:])
    step: AttentionStep | None = batch.derived.get(key)
    if step is None:
        step = batch.derived[key] = AttentionStep(batch, view, heads)
    assert sinks is None or sinks.dtype == projected.dtype
    assert view.keys.dtype == projected.dtype or view.key_exponents is not None
    if out is None:
        out = room((rows, heads, head_dim), projected.dtype)
    assert out.dtype == projected.dtype
    assert out.stride()[1:] == (head_dim, 1)
    cosine, sine = (None, None) if rotation is None else (rotation.cosine, rotation.sine)
    values = LAYER.pack(
        ctypes.addressof(step.values), projected.data_ptr(), address(weight), address(cosine), address(sine),
        view.keys.data_ptr(), view.values.data_ptr(), address(view.key_exponents), address(view.value_exponents),
        address(sinks), out.data_ptr(), projected.stride(0), 0 if cosine is None else cosine.shape[-1] // 2,
        view.keys.stride(0), 0 if view.key_exponents is None else view.key_exponents.stride(0), out.stride(0),
        gated, DTYPES[projected.dtype], 0 if weight is None else DTYPES[weight.dtype],
        CODE_KINDS.get(view.keys.dtype, 0), eps, scale, softcap or 0.0,
    )  # fmt: skip
    call("weft_attention" if view.key_exponents is None else "weft_coded_attention", values)
    return out


class AttentionStep:
    """Pages that a step's rows read, and the division of the work, for all layers that read the same pages."""

    def __init__(self, batch: Batch, view: AttentionView, heads: int) -> None:
        self.view = view
        self.heads = heads
        self.values = AttentionStepFields()
        self.renew(batch)

    def renew(self, batch: Batch) -> None:
        # Keeps alive what the step points to.
        step, *self.kept = plan_step(batch, self.view, self.heads)
        ctypes.memmove(ctypes.addressof(self.values), ctypes.addressof(step), ctypes.sizeof(step))

    def release(self) -> None:
        self.kept = []


def plan_step(batch: Batch, view: AttentionView, heads: int) -> tuple[AttentionStepFields, Tensor, Batch]:
    """Return a step's `AttentionStepFields`, and everything that it points to."""
    assert batch.only_decodes
    listed = batch.pages(view.window)
    assert view.keys.stride() == view.values.stride()
    _, cell, kv_heads, head_dim = view.keys.shape
    assert head_dim <= MOST_SIZE
    stretch_cells = max(1, STRETCH // cell)
    # All on the host: nothing here waits.
    high = batch.start.numpy() + 1
    low = np.zeros_like(high) if view.window is None else np.maximum(0, high - view.window)
    first = int(low.min()) // cell // stretch_cells
    stretches = int(high.max() - 1) // cell // stretch_cells + 1 - first
    enough = int((high - low).sum()) * heads * head_dim >= LEAST_SHARED
    threads = torch.get_num_threads() if enough else 1
    # Two tasks per thread, so that one delayed task does not delay all.
    blocks = min(batch.rows, -(-2 * threads // (stretches * kv_heads)))
    padded = -(-head_dim // VECTOR) * VECTOR
    size = batch.rows * heads * (padded + stretches * (padded + 2 * VECTOR))
    scratch = torch.empty(size, dtype=torch.float32, device="cpu")
    pointers = (batch.start, listed.write_page, listed.first_position, listed.bounds, listed.pages, scratch)
    sizes = (batch.rows, heads, kv_heads, head_dim, cell, view.window or 0)
    step = AttentionStepFields(*map(address, pointers), *sizes, first, stretches, stretch_cells, blocks, threads)
    return step, scratch, batch
