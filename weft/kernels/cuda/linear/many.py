"""Matmuls of hundreds of rows whose output has an activation, as in verifications of drafts.

The library is as fast for the matmul alone, but writes its outputs, which another kernel has to read again. Here as
many programs as there are multiprocessors compute one tile after another, and load the beginning of the next one while
they activate and store the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.between import between
from weft.kernels.cuda.linear.some import can_copy, can_describe

# Numbers of rows and inputs that were measured, on an H200.
MANY_ROWS = range(129, 2049)
LEAST_INPUTS = 2048
# Rows and outputs of a tile, and the inputs that are multiplied at a time, this number of times ahead.
HEIGHT, WIDTH, INPUTS, STAGES = 128, 256, 64, 4
# Outputs of both parts must begin at aligned addresses in every row.
ALIGNED_OUTPUTS = 16
# The share of all tiles' places that must be filled. From here on, all 18 sizes measured were faster than with the
# library, which has tiles of other sizes for what fits badly.
LEAST_FILLED = 0.9


def are_many(x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Return whether `many_rows` is faster. Needs nothing from the device."""
    is_measured = len(x) in MANY_ROWS and weight.shape[1] >= LEAST_INPUTS
    fits = len(weight) % ALIGNED_OUTPUTS == 0 and filled(x, weight) >= LEAST_FILLED
    return is_measured and fits and can_copy(x, weight)


def filled(x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]) -> float:
    """Return the share of what all multiprocessors compute, from the first tile to the last, that is asked for."""
    programs = gpu_of(x.device).multiprocessors
    turns = -(-tiles_of(len(x), len(weight)) // programs)
    return len(x) * len(weight) / (turns * programs * HEIGHT * WIDTH)


def tiles_of(rows: int, outputs: int) -> int:
    return -(-rows // HEIGHT) * -(-outputs // WIDTH)


def many_rows(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None,
    activation: str,
    parts: int,
) -> Float[Tensor, "rows results"]:
    """Return the activation, by name, of the matmul; of two parts side by side, activation(first) * second."""
    (rows, inputs), results = x.shape, len(weight) // parts
    y = torch.empty(rows, results, dtype=x.dtype, device=x.device)
    assert can_describe(x, weight, y)
    programs = min(gpu_of(x.device).multiprocessors, tiles_of(rows, parts * results))
    many_rows_kernel[(programs,)](
        named(
            x=TensorDescriptor.from_tensor(x, [HEIGHT, INPUTS]), weight=weight_tiles(weight, parts), bias=bias,
            y=TensorDescriptor.from_tensor(y, [HEIGHT, WIDTH // 2]), rows=rows, results=results, inputs=inputs,
        ),
        HEIGHT=HEIGHT, HALF=WIDTH // 2, INPUTS=INPUTS, NAME=activation, PARTS=parts,
        num_warps=8, num_stages=STAGES, **early(x),
    )  # fmt: skip
    return y


def weight_tiles(weight: Float[Tensor, "outputs inputs"], parts: int) -> TensorDescriptor:
    """Describe the weights of a tile: with two parts, half of its outputs are the same ones of both."""
    if parts == 1:
        return TensorDescriptor.from_tensor(weight, [WIDTH, INPUTS])
    return TensorDescriptor.from_tensor(weight.unflatten(0, (parts, -1)), [parts, WIDTH // parts, INPUTS])


@jit(remember=False, do_not_specialize=["rows"])
def many_rows_kernel(
    x, weight, bias, y, rows, results, inputs,
    HEIGHT: tl.constexpr, HALF: tl.constexpr, INPUTS: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    high = tl.cdiv(rows, HEIGHT)
    tiles = high * tl.cdiv(results * PARTS, 2 * HALF)
    wait(EARLY)
    # One loop over the inputs of all tiles, so that loads run ahead from tile to tile.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, first = tile % high * HEIGHT, tile // high * (2 * HALF // PARTS)
        total = tl.zeros((HEIGHT, 2 * HALF), tl.float32)
        for column in range(0, inputs, INPUTS):
            # Values outside are zero.
            if PARTS == 2:
                weights = weight.load([0, first, column]).reshape(2 * HALF, INPUTS)
            else:
                weights = weight.load([first, column])
            total = tl.dot(x.load([row, column]), weights.T, total)
        left, right = total.reshape(HEIGHT, 2, HALF).permute(0, 2, 1).split()
        # The right half is the second part of the same outputs, or of the next ones.
        second = results + first if PARTS == 2 else first + HALF
        left, right = rounded(left, bias, first, results, y), rounded(right, bias, second, results * PARTS, y)
        y.store([row, first], between(left, right, 0.0, 0.0, NAME, PARTS).to(y.dtype))
        if PARTS == 1:
            y.store([row, second], between(right, right, 0.0, 0.0, NAME, PARTS).to(y.dtype))


@triton.jit
def rounded(value, bias, first, end, y):
    """Return the outputs from `first` on with their bias, rounded where a separate matmul would."""
    if bias is not None:
        output = first + tl.arange(0, value.shape[1])
        value += tl.load(bias + output, mask=output < end, other=0.0).to(tl.float32)[None, :]
    return value.to(y.dtype).to(tl.float32)
