"""Matmuls of any number of rows with weights in panels, and the activation after them."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES
from weft.kernels.native.activation import ACTIVATIONS
from weft.kernels.native.calls import call, room, scratch
from weft.kernels.native.library import DTYPES, address

PRODUCT = Struct("5P10q")
# Outputs of a panel. panels.h has the same number.
PANEL = 32


def pack(matrix: Float[Tensor, "*many outputs inputs"]) -> Float[Tensor, "*many panels inputs 32"]:
    """Return weights in the layout of panels.h. The outputs of the last panel are filled up with zeros.

    >>> pack(torch.arange(4.0).view(2, 2))[0, :, :2]
    tensor([[0., 2.],
            [1., 3.]])
    """
    filled = F.pad(matrix, (0, 0, 0, -matrix.shape[-2] % PANEL))
    if matrix.dtype == torch.float32:
        packed: Tensor = filled.unflatten(-2, (-1, PANEL)).transpose(-1, -2)
    else:
        # Output j and output j + 16 side by side.
        packed = filled.unflatten(-2, (-1, 2, PANEL // 2)).movedim(-1, -3).transpose(-1, -2).flatten(-2)
    return packed.contiguous()


def product(
    x: Float[Tensor, "n inputs"],
    panels: Float[Tensor, "panels inputs 32"],
    outputs: int,
    bias: Float[Tensor, " outputs"] | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    parts: int = 1,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "n results"]:
    """Return activation(x @ weight.T + bias); with two parts side by side, activation(first) * second.

    Bias and result have `dtype`, by default that of x. If it is bfloat16, x and the weights are, too; if it is float32,
    each may have either. Two parts must be whole panels each.
    """
    rows, inputs = x.shape
    assert panels.shape[1] == inputs > 0, (panels.shape, inputs)
    assert x.stride(1) == 1 or inputs == 1, "the numbers of a row must be adjacent"
    assert outputs <= panels.shape[0] * PANEL < outputs + PANEL, (panels.shape, outputs)
    assert parts == 1 or outputs % (parts * PANEL) == 0, (outputs, parts)
    result = x.dtype if dtype is None else dtype
    assert bias is None or (bias.dtype == result and bias.shape == (outputs,) and bias.stride(0) == 1)
    assert result == torch.float32 or x.dtype == panels.dtype == result
    y, wide = room((rows, outputs // parts), result), scratch(rows * inputs)
    kind = 0 if activation is None else ACTIVATIONS.index(NAMES[activation])
    values = PRODUCT.pack(
        x.data_ptr(), panels.data_ptr(), address(bias), y.data_ptr(), wide.data_ptr(),
        rows, x.stride(0), inputs, outputs, kind, parts, DTYPES[x.dtype], DTYPES[panels.dtype], DTYPES[result],
        torch.get_num_threads(),
    )  # fmt: skip
    call("weft_linear", values)
    return y
