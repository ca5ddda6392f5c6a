"""Activation of a gate, multiplied by the gated values."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES, Function
from weft.kernels.native import activation as kernels
from weft.kernels.native import library as native
from weft.kernels.outputs import placed


def gated_product(
    gate: Float[Tensor, "n size"],
    x: Float[Tensor, "n size"],
    activation: Function,
    out: Float[Tensor, "n size"] | None = None,
) -> Float[Tensor, "n size"]:
    if activation in NAMES and are_few(gate, x):
        return kernels.gate(NAMES[activation], gate, x, out)
    return placed(activation(gate).mul_(x), out)


def add(x: Float[Tensor, "n size"], y: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
    return kernels.add(x, y) if are_few(x, y) else x.add_(y)


def are_few(gate: Tensor, x: Tensor) -> bool:
    """Return whether to use the C++ kernel."""
    return (
        x.ndim == 2
        and 0 < x.shape[0] <= native.FEW_ROWS
        and x.dtype == gate.dtype
        and x.dtype in native.DTYPES
        and x.stride(1) == gate.stride(1) == 1
        and native.available()
    )
