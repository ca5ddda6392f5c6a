"""Matmuls with weights that are not one matrix of plain numbers: each part has a kernel of its format.

Formats that are not packed have a simple kernel here, which adds the blocks of an output's inputs in order.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES, Function
from weft.kernels.cuda.formats.lines import CodeLines
from weft.kernels.cuda.formats.packed import LINES, CodeTiles
from weft.kernels.cuda.formats.tiles import form_of, load_tile, pointers
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.decoded import multiply_decoded
from weft.kernels.cuda.linear.packed import by_library, multiply_packed
from weft.kernels.cuda.linear.rounding import LazyProduct, held_rows
from weft.kernels.cuda.linear.scaled import by_scales, multiply_scaled
from weft.kernels.cuda.linear.tiles import tiled
from weft.kernels.formats.blocks import BlockFormat, OtherInputs
from weft.kernels.formats.rounded import RoundedRows
from weft.kernels.formats.stored import Stored
from weft.kernels.plain.linear import decoded
from weft.kernels.weight import Weight

# Rows and outputs of a program of the simple kernel.
ROWS, OUTPUTS = 16, 64
MANY_ROWS = 64


def multiply_stored(x: Float[Tensor, "*n inputs"], weight: Weight, exact: bool = False) -> Float[Tensor, "*n outputs"]:
    """Return the matmul. `exact`: a row has the same bits in any batch."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    held = held_rows(len(rows)) if any(isinstance(part.format, CodeLines) for part in weight.parts) else len(rows)
    y = torch.empty(held, weight.outputs, dtype=x.dtype, device=x.device)
    first = 0
    for part in weight.parts:
        place = slice(first, first + part.outputs)
        multiply_part(rows, part, None if weight.bias is None else weight.bias[place], y[:, place], exact)
        first += part.outputs
    return y[: len(rows)].view(*x.shape[:-1], weight.outputs)


def multiply_part(
    x: Float[Tensor, "rows inputs"],
    part: Stored,
    bias: Float[Tensor, " outputs"] | None,
    y: Float[Tensor, "held part"],
    exact: bool,
) -> None:
    """Fill the columns of an output that one part computes. It may have rows beyond those of `x`, of any content."""
    if not len(x):
        return
    if by_scales(len(x), part) and not exact:
        multiply_scaled(x, part, bias, y)
        return
    y = y[: len(x)]
    if isinstance(part.format, OtherInputs):
        x, part = x.index_select(1, part.tensors[-1]), part.format.as_stored(part)
    if isinstance(part.format, RoundedRows):
        x, part = part.format.rounded(x).to(x.dtype), part.format.as_stored(part)
    dense = part.dense
    is_ready = is_packed(part) or (dense is not None and dense.dtype == x.dtype and dense.is_contiguous())
    form = None if is_ready else form_of(part)
    can_decode = is_ready or (form is not None and dense is None)
    # The simple kernel decodes once for every few rows, which takes longer than the whole matrix.
    is_slow = isinstance(part.format, BlockFormat)
    if can_decode and (is_slow or decodes_first(len(x), part)) and not exact:
        multiply_decoded(x, part, bias, y)
        return
    if is_ready:
        multiply_packed(x, part, bias, fold=exact, out=y)
        return
    if form is None and exact:
        y.copy_(tiled(x, part.decode().to(x.dtype), bias))
        return
    if form is None:
        total = decoded(x, part)
        y.copy_(total if bias is None else total + bias.float())
        return
    # Tensor cores add up in another order where a tile has few rows.
    rows = ROWS if len(x) <= ROWS and not exact else MANY_ROWS
    stored_kernel[(-(-part.outputs // OUTPUTS), -(-len(x) // rows))](
        named(x=x, x_stride=x.stride(0), rows=len(x)), pointers(part),
        named(bias=bias, y=y, y_stride=y.stride(0), outputs=part.outputs, inputs=part.inputs),
        ROWS=rows, OUTPUTS=OUTPUTS, **form.constants, num_warps=4, num_stages=3, **early(x),
    )  # fmt: skip


def is_packed(part: Stored) -> bool:
    return isinstance(part.format, CodeTiles)


def decodes_first(rows: int, part: Stored) -> bool:
    """Return whether it is faster to decode a matrix for torch's library."""
    return by_library(rows, part.outputs) and not isinstance(part.format, CodeLines)


def is_librarys(rows: int, part: Stored) -> bool:
    """Return whether torch's library multiplies: what follows has kernels of its own."""
    return decodes_first(rows, part) or by_scales(rows, part)


def whole(weight: Weight) -> Stored | None:
    """Return the only part of a weight, if it is packed."""
    return weight.parts[0] if len(weight.parts) == 1 and is_packed(weight.parts[0]) else None


def activated_stored(
    x: Float[Tensor, "rows inputs"], weight: Weight, activation: Function, parts: int, exact: bool = False
) -> Float[Tensor, "rows results"] | None:
    """Return the activation of a matmul if one kernel computes both."""
    part = whole(weight)
    if part is None or activation not in NAMES or part.outputs % (LINES * parts) or x.ndim != 2 or x.stride(1) != 1:
        return None
    if not len(x) or (is_librarys(len(x), part) and not exact):
        return None
    return multiply_packed(x, part, weight.bias, NAMES[activation], parts, fold=exact)


def lazy_product(name: str, gate: Tensor, up: Tensor | None, weight: Weight) -> Tensor | LazyProduct:
    """Return activation(gate) * up. After a matmul with rows in FP8, the next one may compute it while it rounds."""
    found = LazyProduct(name, gate, up)
    return found if any(by_scales(len(gate), part) for part in weight.parts) else found.computed()


def stored_into_stream(x: Float[Tensor, "rows inputs"] | LazyProduct, weight: Weight) -> Tensor:
    """Return the matmul, possibly in parts that are still to be added up."""
    part = whole(weight)
    if isinstance(x, LazyProduct):
        rows = len(x.gate)
        if part is not None and by_scales(rows, part):
            y = torch.empty(held_rows(rows), part.outputs, dtype=x.gate.dtype, device=x.gate.device)
            multiply_scaled(x, part, weight.bias, y)
            return y[:rows]
        x = x.computed()
    if part is None or x.ndim != 2 or x.stride(1) != 1 or not len(x) or is_librarys(len(x), part):
        return multiply_stored(x, weight)
    return multiply_packed(x, part, weight.bias, summed=False)


@jit(do_not_specialize=["rows"])
def stored_kernel(
    x, x_stride, rows, codes, scales, more, bias, y, y_stride, outputs, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (row < rows)[:, None]
    wait(EARLY)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for begin in range(0, inputs, STEP):
        column = begin + tl.arange(0, STEP)
        values = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
        value = tl.load(values, mask=is_row & (column < inputs)[None, :], other=0.0)
        tile, scale = load_tile(
            codes, scales, more, 0, output, column, outputs, inputs, FORMAT, BLOCK_ROWS, BLOCK_COLUMNS
        )
        total += tl.dot(value, tl.trans(tile.to(value.dtype)), input_precision="ieee") * scale[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    place = y + row.to(tl.int64)[:, None] * y_stride + output[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=is_row & (output < outputs)[None, :])
