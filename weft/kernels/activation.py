"""Activation functions, alone or on a gate that is then multiplied with what it gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.native import library as native
from weft.kernels.placing import placed


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


# Those that a GPU has a kernel for, and what it calls them.
KERNELS: dict[Callable[[Tensor], Tensor], str] = {
    F.silu: "silu",
    F.gelu: "gelu",
    gelu_tanh: "gelu_tanh",
    F.relu: "relu",
    squared_relu: "relu2",
    torch.sigmoid: "sigmoid",
}


def activated(x: Float[Tensor, "n size"], activation: Callable[[Tensor], Tensor]) -> Float[Tensor, "n size"]:
    if x.is_cuda and activation in KERNELS:
        from weft.kernels.cuda.activation import activate

        return activate(KERNELS[activation], x)
    return activation(x)


def gated_product(
    gate: Float[Tensor, "n size"],
    x: Float[Tensor, "n size"],
    activation: Callable[[Tensor], Tensor],
    out: Float[Tensor, "n size"] | None = None,
) -> Float[Tensor, "n size"]:
    """activation(gate) * x; all may be strided. `out`, if given, is filled and returned."""
    if gate.is_cuda and activation in KERNELS:
        from weft.kernels.cuda.activation import activate

        return activate(KERNELS[activation], gate, x, out)
    if _are_few(gate, x) and activation in KERNELS:
        from weft.kernels.native import activation as kernels

        return kernels.gate(KERNELS[activation], gate, x, out)
    return placed(activation(gate).mul_(x), out)


def _are_few(gate: Tensor, x: Tensor) -> bool:
    """Whether our own kernel on a CPU is to multiply them."""
    return (
        x.is_cpu
        and x.ndim == 2
        and 0 < x.shape[0] <= native.FEW_ROWS
        and x.dtype == gate.dtype
        and x.dtype in native.DTYPES
        and x.stride(1) == gate.stride(1) == 1
        and native.available()
    )
