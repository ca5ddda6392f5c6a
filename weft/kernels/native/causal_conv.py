"""Causal depthwise convolution of rows of one token on a CPU: one call per layer."""

from __future__ import annotations

from struct import Struct

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.native.calls import call, room
from weft.kernels.native.library import DTYPES, address
from weft.kernels.native.limits import MOST_WIDTH
from weft.kernels.native.steps import step_address
from weft.kernels.recurrent import ConvolutionWeights

CONVOLUTION = Struct("7P9q")


def convolve(
    x: Float[Tensor, "rows inputs"],
    weights: ConvolutionWeights,
    batch: Batch,
    view: RecurrentView,
    gated: bool = False,
) -> Float[Tensor, "rows channels"]:
    """Convolve; `gated`: x holds the factor before, the factor after, and the input itself."""
    weight, bias = weights.taps, weights.bias
    (channels, width), dtype, state, tail = weight.shape, x.dtype, view.state["conv"], view.tail["conv"]
    x_stride, inner = x.stride()
    assert width <= MOST_WIDTH
    assert inner == 1
    assert dtype == state.dtype
    if weight.dtype != torch.float32 or weight.stride() != (1, channels):
        weight = weight.float().t().contiguous().t()
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.float()
    y = room((x.shape[0], channels), dtype)
    values = CONVOLUTION.pack(
        step_address(batch),
        x.data_ptr(), weight.data_ptr(), address(bias), y.data_ptr(), state.data_ptr(), tail.data_ptr(),
        x_stride, state.stride()[0], tail.stride()[0], channels, width, tail.shape[1],
        DTYPES[dtype], weights.activation, gated,
    )  # fmt: skip
    call("weft_causal_conv", values)
    return y
