"""Matmuls with weights as the checkpoint stores them."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import Function
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight


def prepare(weight: Weight, twice: bool) -> Weight:
    return weight


def linear(x: Normed, weight: Weight) -> Float[Tensor, "*n outputs"]:
    assert isinstance(x, Tensor)
    return F.linear(x, weight.matrix, weight.bias)


def linear_into_stream(x: Float[Tensor, "n inputs"], weight: Weight) -> Addend:
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    projected = linear(x, weight)
    if parts == 1:
        return activation(projected)
    gate, up = projected.chunk(2, -1)
    return activation(gate) * up
