"""Matmuls with weights as the checkpoint stores them: formats are decoded, and multiplied in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import Function
from weft.kernels.formats.stored import Stored
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight


def prepare(weight: Weight, twice: bool) -> Weight:
    return weight


def linear(x: Normed, weight: Weight) -> Float[Tensor, "*n outputs"]:
    assert isinstance(x, Tensor)
    if weight.matrix is not None:
        return F.linear(x, weight.matrix, weight.bias)
    return torch.cat([decoded(x, part) for part in weight.parts], -1).add(nothing_or(weight.bias)).to(x.dtype)


def decoded(x: Float[Tensor, "*n inputs"], part: Stored) -> Float[Tensor, "*n outputs"]:
    """Return the matmul with a matrix of any format, in float32."""
    return F.linear(x.float(), part.decode())


def nothing_or(bias: Float[Tensor, " outputs"] | None) -> Float[Tensor, " outputs"] | float:
    return 0.0 if bias is None else bias.float()


def linear_into_stream(x: Float[Tensor, "n inputs"], weight: Weight) -> Addend:
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    projected = linear(x, weight)
    if parts == 1:
        return activation(projected)
    gate, up = projected.chunk(2, -1)
    return activation(gate) * up
