"""Matmuls of a few rows with weights in checkpoint layout, and the activation after them."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES
from weft.kernels.native.activation import ACTIVATIONS
from weft.kernels.native.calls import call, room
from weft.kernels.native.library import DTYPES, address

PRODUCT = Struct("4P9q")
# The limit of linear.cpp's buffers.
MOST_ROWS = 16


def few_rows(
    x: Float[Tensor, "n inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    parts: int = 1,
) -> Float[Tensor, "n results"]:
    """Return activation(x @ weight.T + bias); with two parts side by side, activation(first) * second.

    All operands have one dtype, except that weights may be bfloat16 if the rest is float32.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert rows <= MOST_ROWS, rows
    assert bias is None or bias.dtype == x.dtype
    y = room((rows, outputs // parts), x.dtype)
    kind = 0 if activation is None else ACTIVATIONS.index(NAMES[activation])
    values = PRODUCT.pack(
        x.data_ptr(), weight.data_ptr(), address(bias), y.data_ptr(),
        rows, x.stride(0), inputs, outputs, kind, parts, DTYPES[x.dtype], DTYPES[weight.dtype], torch.get_num_threads(),
    )  # fmt: skip
    call("weft_linear", values)
    return y
