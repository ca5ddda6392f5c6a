"""Matmuls of any number of rows with weights in panels, and the activation after them."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.activations import NAMES
from weft.kernels.formats.stored import Stored
from weft.kernels.native.activation import ACTIVATIONS
from weft.kernels.native.calls import call, room, scratch
from weft.kernels.native.layouts import StoredPanels
from weft.kernels.native.library import DTYPES, address
from weft.kernels.native.packing import PANEL, put_in_panels
from weft.kernels.native.stored import panel_bytes

PRODUCT, COLUMNS = Struct("5P14q"), Struct("3P4q")


def pack(
    matrix: Float[Tensor, "*many outputs inputs"], empty: Callable[..., Tensor] = torch.empty
) -> Float[Tensor, "*many panels inputs 32"]:
    """Return weights in the layout of panels.h: of 16-bit numbers, outputs j and j + 16 lie side by side.

    The outputs of the last panel are filled up with zeros. `empty` makes the memory: `large_pages.empty` for weights
    that stay.
    """
    *many, outputs, inputs = matrix.shape
    panels = empty(*many, -(-outputs // PANEL), inputs, PANEL, dtype=matrix.dtype)
    if panels.numel():
        put_in_panels(matrix, outputs, inputs, DTYPES[matrix.dtype], panels)
    return panels


def product(
    x: Float[Tensor, "n inputs"],
    panels: Float[Tensor, "panels inputs 32"],
    outputs: int,
    bias: Float[Tensor, " outputs"] | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    parts: int = 1,
    dtype: torch.dtype | None = None,
    y: Float[Tensor, "n results"] | None = None,
) -> Float[Tensor, "n results"]:
    """Return activation(x @ weight.T + bias); with two parts side by side, activation(first) * second.

    `y`: write there, into rows that may lie apart. Bias and result have `dtype`, by default that of x. If it is
    bfloat16, x and the weights are, too; if it is float32, each may have either. Two parts must be whole panels each.
    """
    assert panels.shape[1] == x.shape[1] > 0, (panels.shape, x.shape)
    assert outputs <= panels.shape[0] * PANEL < outputs + PANEL, (panels.shape, outputs)
    if y is None:
        y = room((x.shape[0], outputs // parts), x.dtype if dtype is None else dtype)
    assert y.shape == (x.shape[0], outputs // parts)
    assert y.dtype == torch.float32 or x.dtype == panels.dtype == y.dtype
    _multiply(x, panels, DTYPES[panels.dtype], (0, 0, 0), outputs, bias, activation, parts, y)
    return y


def stored_product(
    x: Float[Tensor, "n inputs"],
    stored: Stored,
    bias: Float[Tensor, " outputs"] | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    parts: int = 1,
    y: Float[Tensor, "n results"] | None = None,
) -> Float[Tensor, "n results"]:
    """Return the same with weights in panels of a stored format."""
    layout, [panels] = stored.format, stored.tensors
    assert isinstance(layout, StoredPanels)
    assert x.shape[1] == stored.inputs, (x.shape, stored.inputs)
    assert panels.is_contiguous()
    assert panels.shape[0] == -(-stored.outputs // PANEL), (panels.shape, stored.outputs)
    assert panels.shape[1] == panel_bytes(layout, stored.inputs), (panels.shape, stored.inputs)
    if y is None:
        y = room((x.shape[0], stored.outputs // parts), x.dtype)
    assert y.dtype == x.dtype
    assert y.shape == (x.shape[0], stored.outputs // parts)
    own = panels.shape[1], layout.columns, int(layout.are_rounded)
    _multiply(x, panels, layout.kind, own, stored.outputs, bias, activation, parts, y)
    return y


def take_columns(x: Float[Tensor, "n inputs"], order: Int[Tensor, " taken"]) -> Float[Tensor, "n taken"]:
    """Return these inputs of every row, in this order."""
    assert order.dtype == torch.int64
    assert order.is_contiguous()
    assert x.stride(1) == 1 or x.shape[1] == 1, "the numbers of a row must be adjacent"
    y = room((x.shape[0], len(order)), x.dtype)
    pointers = (x.data_ptr(), order.data_ptr(), y.data_ptr())
    call("weft_take_columns", COLUMNS.pack(*pointers, x.shape[0], x.stride(0), len(order), DTYPES[x.dtype]))
    return y


def _multiply(
    x: Float[Tensor, "n inputs"],
    panels: Tensor,
    weight_kind: int,
    of_format: tuple[int, int, int],
    outputs: int,
    bias: Float[Tensor, " outputs"] | None,
    activation: Callable[[Tensor], Tensor] | None,
    parts: int,
    y: Float[Tensor, "n results"],
) -> None:
    rows, inputs = x.shape
    assert x.stride(1) == 1 or inputs == 1, "the numbers of a row must be adjacent"
    assert y.stride(1) == 1 or y.shape[1] == 1, "the numbers of a result must be adjacent"
    assert parts == 1 or outputs % (parts * PANEL) == 0, (outputs, parts)
    assert bias is None or (bias.dtype == y.dtype and bias.shape == (outputs,) and bias.stride(0) == 1)
    work = scratch(rows * inputs)
    kind = 0 if activation is None else ACTIVATIONS.index(NAMES[activation])
    values = PRODUCT.pack(
        x.data_ptr(), panels.data_ptr(), address(bias), y.data_ptr(), work.data_ptr(),
        rows, x.stride(0), inputs, outputs, y.stride(0), kind, parts, DTYPES[x.dtype], weight_kind, DTYPES[y.dtype],
        torch.get_num_threads(), *of_format,
    )  # fmt: skip
    call("weft_linear", values)
