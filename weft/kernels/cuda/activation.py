"""Activations in one kernel: of a matmul's output alone, or of a gate times the gated values."""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES, Function
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.outputs import placed

# Elements per program and its warps, measured on an H200.
LOADED = 2048
WARPS = 4


def gated_product(
    gate: Float[Tensor, "n size"],
    x: Float[Tensor, "n size"],
    activation: Function,
    out: Float[Tensor, "n size"] | None = None,
) -> Float[Tensor, "n size"]:
    if activation in NAMES:
        return activate(NAMES[activation], gate, x, out)
    return placed(activation(gate).mul_(x), out)


def add(x: Float[Tensor, "n size"], y: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
    return x.add_(y)


def activate(
    name: str,
    x: Float[Tensor, "n size"],
    factor: Float[Tensor, "n size"] | None = None,
    out: Float[Tensor, "n size"] | None = None,
) -> Float[Tensor, "n size"]:
    """Return activation(x), times `factor` if given; rows may be strided. The arithmetic is float32.

    `out`, if given, is filled and returned; it may be one of the inputs, or strided.
    """
    rows, size = x.shape
    if out is None:
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    assert x.stride(1) == out.stride(1) == 1
    assert factor is None or factor.stride(1) == 1
    if rows:
        block = LOADED if factor is None else LOADED // 2
        activate_kernel[(rows, -(-size // block))](
            named(
                x=x, x_stride=x.stride(0), factor=factor, factor_stride=0 if factor is None else factor.stride(0),
                out=out, out_stride=out.stride(0), size=size,
            ),
            NAME=name, BLOCK=block, num_warps=WARPS, **early(x),
        )  # fmt: skip
    return out


@jit
def activate_kernel(
    x, x_stride, factor, factor_stride, out, out_stride, size,
    NAME: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < size
    wait(EARLY)
    value = tl.load(x + row * x_stride + column, mask=real, other=0.0).to(tl.float32)
    if NAME == "silu":
        value = value * tl.sigmoid(value)
    elif NAME == "sigmoid":
        value = tl.sigmoid(value)
    elif NAME == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # tanh(z) = 2 * sigmoid(2 z) - 1, so (1 + tanh(z)) / 2 is sigmoid(2 z).
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif NAME == "relu":
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(NAME == "relu2")
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = value * value
    if factor is not None:
        value = value * tl.load(factor + row * factor_stride + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=real)
