"""Activation functions, alone or on a gate that is then multiplied with what it gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


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
    gate: Float[Tensor, "n size"], x: Float[Tensor, "n size"], activation: Callable[[Tensor], Tensor]
) -> Float[Tensor, "n size"]:
    """activation(gate) * x; both may be strided."""
    if gate.is_cuda and activation in KERNELS:
        from weft.kernels.cuda.activation import activate

        return activate(KERNELS[activation], gate, x)
    return activation(gate).mul_(x)
