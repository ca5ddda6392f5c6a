"""Matmuls with weights as the checkpoint stores them: formats are decoded, and multiplied in float32."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import Function
from weft.kernels.formats.rounded import FP8, NOTHING, RoundedRows, takes_fp8
from weft.kernels.formats.stored import Stored
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight


def prepare(weight: Weight, twice: bool, rounds: Set[str] = NOTHING) -> Weight:
    return replace(weight, parts=tuple(prepared(part, rounds) for part in weight.parts))


def prepared(part: Stored, rounds: Set[str]) -> Stored:
    """Return a matrix, or those of experts, that rows are multiplied with after they are rounded, if they are."""
    return RoundedRows.of(part, FP8) if FP8 in rounds and takes_fp8(part) else part


def linear(x: Normed, weight: Weight) -> Float[Tensor, "*n outputs"]:
    assert isinstance(x, Tensor)
    if weight.matrix is not None:
        return F.linear(x, weight.matrix, weight.bias)
    return torch.cat([decoded(x, part) for part in weight.parts], -1).add(nothing_or(weight.bias)).to(x.dtype)


def decoded(x: Float[Tensor, "*n inputs"], part: Stored) -> Float[Tensor, "*n outputs"]:
    """Return the matmul with a matrix of any format, in float32."""
    if isinstance(part.format, RoundedRows):
        return decoded(part.format.rounded(x), part.format.as_stored(part))
    return F.linear(x.float(), part.decode())


def nothing_or(bias: Float[Tensor, " outputs"] | None) -> Float[Tensor, " outputs"] | float:
    return 0.0 if bias is None else bias.float()


def linear_into_stream(x: Normed, weight: Weight) -> Addend:
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    projected = linear(x, weight)
    if parts == 1:
        return activation(projected)
    gate, up = projected.chunk(2, -1)
    return activation(gate) * up
