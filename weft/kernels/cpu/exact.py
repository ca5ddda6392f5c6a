"""Layouts of weights in exact mode: panels only. One C++ kernel multiplies them with any number of rows, each alone."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from weft.kernels.cpu.linear import shortened
from weft.kernels.experts import ExpertWeights
from weft.kernels.native import library as native
from weft.kernels.native.linear import pack
from weft.kernels.weight import Weight


def prepare(weight: Weight, twice: bool) -> Weight:
    matrix = panels(weight.matrix)
    return weight if matrix is weight.matrix else Weight(matrix, weight.bias, None, weight.outputs)


def prepare_experts(layer: ExpertWeights, twice: bool) -> ExpertWeights:
    return replace(layer, first=panels(layer.first), second=panels(layer.second))


def panels(matrices: Float[Tensor, "*many outputs inputs"]) -> Float[Tensor, "*layout"]:
    """Return weights in panels; unchanged if there are no C++ kernels for them."""
    if not matrices.numel() or matrices.dtype not in native.DTYPES or not native.available():
        return matrices
    return pack(shortened(matrices.detach()))
