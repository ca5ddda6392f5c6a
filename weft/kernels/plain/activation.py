"""Activation of a gate, multiplied by the gated values."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import Function
from weft.kernels.outputs import placed


def gated_product(
    gate: Float[Tensor, "n size"],
    x: Float[Tensor, "n size"],
    activation: Function,
    out: Float[Tensor, "n size"] | None = None,
) -> Float[Tensor, "n size"]:
    return placed(activation(gate) * x, out)


def add(x: Float[Tensor, "n size"], y: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
    return x.add_(y)
