"""Causal depthwise convolution of rows of one token on a CPU: one call for a layer."""

from __future__ import annotations

from struct import Struct

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch
from weft.kernels.native.library import DTYPES, address, kernel
from weft.kernels.native.steps import packed_step
from weft.memory.device.store import RecurrentView

CONVOLUTION = Struct("6P9q")
MOST_WIDTH = 8


def causal_conv(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None,
    activation: bool,
    batch: Batch,
    view: RecurrentView,
    gated: bool = False,
) -> Float[Tensor, "rows channels"]:
    """As the reference; `gated`: x holds what is multiplied before, what is multiplied after, and the input itself."""
    (channels, width), state, tail = weight.shape, view.state["conv"], view.tail["conv"]
    assert width <= MOST_WIDTH
    assert x.stride(1) == 1
    assert x.dtype == state.dtype
    taps = weight.t()
    if taps.dtype != torch.float32 or not taps.is_contiguous():
        taps = taps.float().contiguous()
    if bias is not None:
        bias = bias.float()
    y = x.new_empty(len(x), channels)
    call = CONVOLUTION.pack(
        x.data_ptr(), taps.data_ptr(), address(bias), y.data_ptr(), state.data_ptr(), tail.data_ptr(),
        x.stride(0), state.stride(0), tail.stride(0), channels, width, tail.shape[1],
        DTYPES[x.dtype], activation, gated,
    )  # fmt: skip
    kernel("weft_causal_conv", "p")(packed_step(batch) + call)
    return y
