"""Matmul of one row with weights: bound by reading the weights once, which takes many loads in flight.

A program loads all its weights into registers at once, or as many as fit, so no work is split among programs and no
partial sums remain to be added. A small matmul requests its weights before the row is ready, while the previous
kernels run. A large one would only delay those kernels.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.between import between
from weft.kernels.cuda.linear.vectors import Vectors, hold, normed, operands, piece, pieces, tile
from weft.kernels.cuda.norm import LazyNorm

# Measured on an H200, on whole steps: loads per thread for which a program takes more than one output.
USUAL_LOADS = 8
MOST_OUTPUTS = 4
WARPS = 4
# With fewer outputs than this a program takes one.
FEW_OUTPUTS = 512
# Number of weights up to which a matmul is small.
SMALL = 12 << 20


def blocks(results: int, inputs: int, parts: int) -> Vectors:
    """Return block sizes that keep the usual number of loads in flight.

    >>> blocks(2048, 2048, 1), blocks(12288, 4096, 2), blocks(4480, 15680, 1), blocks(32, 2048, 1)
    (Vectors(rows=4, warps=4), Vectors(rows=1, warps=4), Vectors(rows=1, warps=4), Vectors(rows=1, warps=4))
    """
    single = Vectors(1, WARPS)
    rows = MOST_OUTPUTS if results >= FEW_OUTPUTS else 1
    while rows > 1 and rows * parts * single.pieces(inputs) > USUAL_LOADS:
        rows //= 2
    return Vectors(rows, WARPS)


def one_row(
    x: Float[Tensor, "1 inputs"] | LazyNorm,
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    activation: str | None = None,
    parts: int = 1,
    by: Vectors | None = None,
) -> Float[Tensor, "1 results"]:
    """Return the matmul; with a named activation, activation(matmul) or, of two parts, activation(first) * second."""
    inputs, results = weight.shape[1], len(weight) // parts
    row, source = operands(x)
    y = torch.empty(1, results, dtype=row.dtype, device=row.device)
    by = by or blocks(results, inputs, parts)
    one_row_kernel[(-(-results // by.rows),)](
        source, named(weight=weight, bias=bias, y=y, results=results),
        AHEAD=weight.numel() <= SMALL, INPUTS=inputs, NAME=activation or "", PARTS=parts,
        OUTPUTS=by.rows, COLUMNS=by.columns,
        AT_ONCE=by.at_once(parts * row.element_size()), num_warps=by.warps, **early(row),
    )  # fmt: skip
    return y


@jit
def one_row_kernel(
    x, scale, eps, change, factor, stream, norm, weight, bias, y, results,
    AHEAD: tl.constexpr, INPUTS: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if not AHEAD:
        wait(EARLY)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < results
    row = output.to(tl.int64)
    gate_bias, up_bias = 0.0, 0.0
    if bias is not None:
        gate_bias = tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
        up_bias = tl.load(bias + results * (PARTS - 1) + output, mask=real, other=0.0).to(tl.float32)
    if scale is not None:
        scales = pieces(scale, INPUTS, COLUMNS)
    gate = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    up = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    PIECES: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    for begin in tl.static_range(0, PIECES, AT_ONCE):
        gates, ups = (), ()
        for number in tl.static_range(begin, min(begin + AT_ONCE, PIECES)):
            gates += (tile(weight, row, real, number, INPUTS, COLUMNS),)
            if PARTS == 2:
                ups += (tile(weight, row + results, real, number, INPUTS, COLUMNS),)
        if AHEAD and begin == 0:
            wait(EARLY)
        hold()
        if scale is not None and begin == 0:
            values = normed(x, scales, eps, change, factor, stream, norm, tl.program_id(0) == 0, INPUTS, COLUMNS)
        for number in tl.static_range(begin, min(begin + AT_ONCE, PIECES)):
            value = values[number] if scale is not None else piece(x, number, INPUTS, COLUMNS)
            value = value.to(tl.float32)[None, :]
            gate += gates[number - begin].to(tl.float32) * value
            if PARTS == 2:
                up += ups[number - begin].to(tl.float32) * value
    if PARTS == 2:
        one, other = tl.split(tl.sum(tl.join(gate, up), 1))
    else:
        one, other = tl.sum(gate, 1), 0.0
    one, other = one + gate_bias, other + up_bias
    dtype: tl.constexpr = y.dtype.element_ty
    if NAME != "":
        # Round where a separate matmul would.
        one = one.to(dtype).to(tl.float32)
        if PARTS == 2:
            other = other.to(dtype).to(tl.float32)
        one = between(one, other, 0.0, 0.0, NAME, PARTS)
    tl.store(y + output, one.to(dtype), mask=real)
