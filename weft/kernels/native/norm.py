"""Norms: of a residual stream plus its changes, and of a mixer's output with its gate."""

from __future__ import annotations

from struct import Struct

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.native.calls import call, room, scratch
from weft.kernels.native.library import DTYPES, address
from weft.kernels.outputs import rows_are_lines
from weft.kernels.stream import Change

JOIN, GATED = Struct("6P5q3f"), Struct("5P12qf")
# Rows that a thread takes at a time, and the floats of a vector. norm.cpp has the same block.
BLOCK, LANES = 64, 16
NOTHING = (None, 1.0, None, 0.0)


def join(
    x: Float[Tensor, "n size"], change: Change | None, weight: Float[Tensor, " size"], eps: float
) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]:
    """Return x plus the change, and the norm of that."""
    (rows, size), dtype = x.shape, x.dtype
    normed = room((rows, size), dtype)
    joined = x if change is None else room((rows, size), dtype)
    value, factor, own, own_eps = (
        NOTHING if change is None else (change.value, change.factor, change.weight, change.eps)
    )
    values = JOIN.pack(
        x.data_ptr(), address(value), address(own), weight.data_ptr(), joined.data_ptr(), normed.data_ptr(),
        rows, size, DTYPES[dtype], DTYPES[weight.dtype], torch.get_num_threads(), factor, own_eps, eps,
    )  # fmt: skip
    call("weft_join", values)
    return joined, normed


def gated_norm(
    x: Float[Tensor, "*n size"],
    gate: Float[Tensor, "*n size"],
    weight: Float[Tensor, " size"],
    eps: float,
    groups: int,
    gate_first: bool,
    out: Float[Tensor, "*n size"] | None = None,
) -> Float[Tensor, "*n size"]:
    """Return norm(x) * silu(gate) or norm(x * silu(gate)); each part of a row is normed separately."""
    assert gate.dtype != torch.float32 or x.dtype == weight.dtype == torch.float32
    size = x.shape[-1] // groups
    parts = groups if x.ndim == 2 else x.shape[1] * groups
    y = room(gate.shape, gate.dtype) if out is None else out
    assert y.dtype == gate.dtype
    assert rows_are_lines(y)
    lines = scratch(-(-x.shape[0] // BLOCK) * -(-size // LANES) * LANES)
    values = GATED.pack(
        x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr(), lines.data_ptr(),
        x.shape[0], parts, size, x.stride(0), gate.stride(0), y.stride(0), size if x.ndim == 2 else 0,
        gate_first, DTYPES[x.dtype], DTYPES[gate.dtype], DTYPES[weight.dtype], torch.get_num_threads(), eps,
    )  # fmt: skip
    call("weft_gated_norm", values)
    return y
