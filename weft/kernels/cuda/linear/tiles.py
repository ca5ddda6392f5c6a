"""Matmuls of any number of rows with any weights, in tiles whose sums over the inputs are in order.

The library is several times slower if the number of outputs is not a multiple of 8. The exact package also uses
these tiles where the library might split a sum, or is not known not to. A tile's shape does not change a bit: tensor
cores add products to one accumulator in the order of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.launch.gpus import H200, Gpu, gpu_of
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, on_branch, wait
from weft.kernels.cuda.linear.few import counters, share_of


class Tile(NamedTuple):
    """Tile sizes: rows and outputs per program, inputs per iteration."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# Adjacent tiles of rows that are computed for the same outputs one after another, while the weights are in the cache.
ADJACENT = 8
# Tiles of float32 weights, for any number of rows: here the order of a sum does depend on the tile.
FLOAT32 = Tile(16, 32, 64, 4, 3)


def tile_of(rows: int, outputs: int, gpu: Gpu = H200) -> Tile:
    """Return the fastest tile measured. There is no split of the inputs to choose.

    >>> tile_of(100, 2048)
    Tile(rows=64, outputs=32, inputs=128, warps=4, stages=4)
    """
    if not gpu.is_roomy:
        return Tile(16 if rows <= 16 else 64, 64, 64, 4, 3)
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4)
    if -(-rows // 128) * -(-outputs // 128) >= gpu.multiprocessors:
        return Tile(128, 128, 64, 8, 3)
    if -(-rows // 64) * -(-outputs // 64) >= gpu.multiprocessors:
        return Tile(64, 64, 128, 4, 4)
    return Tile(64, 32, 128, 4, 4)


def tile_of_shares(rows: int, gpu: Gpu = H200) -> Tile:
    """Return a tile of matmuls in shares: the fastest of 128 rows, and a wide one of many."""
    if not gpu.is_roomy:
        return Tile(64, 64, 64, 4, 3)
    if rows > 256:
        return Tile(128, 128, 64, 8, 4)
    return Tile(64, 64, 128, 4, 4)


def tiled(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    by: Tile | None = None,
    shares: int = 1,
) -> Float[Tensor, "rows outputs"]:
    """Return the matmul, rounded once. `by` overrides the usual tile.

    The inputs are cut into `shares`, which are summed separately and added in their order, as `few_rows` does.
    """
    rows, outputs = len(x), len(weight)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    gpu = gpu_of(x.device)
    by = by or (tile_of(rows, outputs, gpu) if shares == 1 else tile_of_shares(rows, gpu))
    launch(x, weight, bias, y, by, "tf32", shares)
    return y


def float32_scores(
    x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "rows outputs"]:
    """Return the float32 matmul of rows in half precision with float32 weights, always in the same tiles."""
    y = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    launch(x, weight, None, y, FLOAT32, "tf32x3")
    return y


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, by: Tile, precision: str, shares: int = 1
) -> None:
    (rows, inputs), outputs = x.shape, len(weight)
    assert x.stride(1) == weight.stride(1) == 1
    if not rows:
        return
    tiles = -(-rows // by.rows) * -(-outputs // by.outputs)
    # Where tiles are too few to occupy the GPU, each share has a program.
    apart = shares > 1 and tiles < gpu_of(x.device).multiprocessors
    found = torch.empty(shares, rows, outputs, dtype=torch.float32, device=x.device) if apart else None
    tiled_kernel[(tiles, shares if apart else 1)](
        named(
            x=x, weight=weight, bias=bias, y=y, rows=rows, outputs=outputs, inputs=inputs, x_stride=x.stride(0),
            weight_stride=weight.stride(0), share=share_of(inputs, shares),
            found=found, come=counters(x.device, on_branch()) if apart else None,
        ),
        ROWS=by.rows, OUTPUTS=by.outputs, INPUTS=by.inputs, EVEN=inputs % by.inputs == 0, SHARES=shares,
        ADJACENT=ADJACENT, PRECISION=precision, num_warps=by.warps, num_stages=by.stages, **early(x),
    )  # fmt: skip


@jit(do_not_specialize=["rows"])
def tiled_kernel(
    x, weight, bias, y, rows, outputs, inputs, x_stride, weight_stride, share, found, come,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, SHARES: tl.constexpr,
    ADJACENT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row_tile, output_tile = place(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS), ADJACENT)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Beyond the end, a valid line is read again and not stored.
    values = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + column[None, :]
    weights = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * weight_stride + column[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    wait(EARLY)
    real = (row < rows)[:, None] & (output < outputs)[None, :]
    place_in = row.to(tl.int64)[:, None] * outputs + output[None, :]
    # Sums from zero are never negative zeros, so it does not matter that their own sum starts from zero too.
    if found is None:
        for number in tl.range(SHARES, num_stages=1):
            total += sum_of_share(
                values, weights, column, number * share, tl.minimum(inputs, (number + 1) * share), inputs,
                ROWS, OUTPUTS, INPUTS, EVEN, PRECISION,
            )  # fmt: skip
    else:
        number = tl.program_id(1)
        part = sum_of_share(
            values, weights, column, number * share, tl.minimum(inputs, (number + 1) * share), inputs,
            ROWS, OUTPUTS, INPUTS, EVEN, PRECISION,
        )  # fmt: skip
        size = rows.to(tl.int64) * outputs
        tl.store(found + number * size + place_in, part, mask=real)
        # All threads must store before the counter signals the others. The last program adds up.
        tl.debug_barrier()
        if tl.atomic_add(come + tl.program_id(0), 1, sem="acq_rel") < SHARES - 1:
            return
        for other in range(SHARES):
            total += tl.load(found + other * size + place_in, mask=real, other=0.0, cache_modifier=".cg")
        tl.store(come + tl.program_id(0), 0)
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place_in, total.to(y.dtype.element_ty), mask=real)


@triton.jit
def sum_of_share(
    values, weights, column, begin, end, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile's sum over the inputs from `begin` to `end`, in their order."""
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(begin, end, INPUTS):
        if EVEN:
            value, w = tl.load(values + first), tl.load(weights + first)
        else:
            is_input = (first + column < inputs)[None, :]
            value = tl.load(values + first, mask=is_input, other=0.0)
            w = tl.load(weights + first, mask=is_input, other=0.0)
        total = tl.dot(value.to(w.dtype), tl.trans(w), total, input_precision=PRECISION)
    return total


@triton.jit
def place(program, row_tiles, output_tiles, ADJACENT: tl.constexpr):
    """Return the tile of a program, so that programs that run together share weights and rows."""
    first = program // (ADJACENT * output_tiles) * ADJACENT
    height = tl.minimum(row_tiles - first, ADJACENT)
    within = program % (ADJACENT * output_tiles)
    return first + within % height, within // height
