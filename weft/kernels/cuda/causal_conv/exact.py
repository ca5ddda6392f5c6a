"""Convolutions of the exact package: the usual kernels, and one row of a short convolution in the form of few."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda.causal_conv import projected_short_conv, suits
from weft.kernels.cuda.causal_conv.convolution import Gates, causal_conv
from weft.kernels.cuda.linear.exact import linear, shares_of
from weft.kernels.cuda.norm.exact import rows_of
from weft.kernels.interface import Batch
from weft.kernels.recurrent import ConvolutionWeights
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

__all__ = ["causal_conv", "short_conv"]


def short_conv(
    x: Normed, projection: Weight, weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens channels"]:
    rows = rows_of(x)
    matrix = projection.matrix
    if matrix is not None and suits(rows, matrix, batch) and shares_of(*matrix.shape) == 1:
        return projected_short_conv(
            rows, matrix, projection.bias, weights.taps, weights.bias, batch, view, by_vectors=False
        )
    before, after, value = linear(rows, projection).chunk(3, dim=-1)
    return causal_conv(value, weights, batch, view, Gates(before, after))
