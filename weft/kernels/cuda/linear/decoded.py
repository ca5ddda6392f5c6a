"""Matmuls of hundreds of rows with weights in codes: decoded piece by piece, and multiplied by torch's library.

A piece is decoded into memory that is freed right after. Its numbers are rounded to the dtype of the rows.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.formats import tiles
from weft.kernels.cuda.formats.codes import (
    STEP,
    TILE,
    factor_of,
    form_of,
    numbers_of,
    scale_at,
    scales_of,
    words_of,
    zero_at,
)
from weft.kernels.cuda.formats.packed import LINES
from weft.kernels.cuda.formats.packed import STEP as TILE_INPUTS
from weft.kernels.cuda.formats.tiles import load_tile, pointers
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.formats.stored import Stored

# Numbers of a piece: enough outputs to occupy a GPU, in memory that mostly stays in its cache.
PIECE = 32 << 20
# Outputs of a program that decodes.
OUTPUTS = 64


def multiply_decoded(
    x: Float[Tensor, "rows inputs"],
    part: Stored,
    bias: Float[Tensor, " outputs"] | None,
    out: Float[Tensor, "rows outputs"],
) -> Float[Tensor, "rows outputs"]:
    """Fill `out` with the matmul."""
    dense = part.dense
    lines = part.outputs if dense is not None else max(LINES, PIECE // part.inputs // LINES * LINES)
    for first in range(0, part.outputs, lines):
        last = min(part.outputs, first + lines)
        matrix = decode(part, first, last, x) if dense is None else dense
        torch.mm(x, matrix.t(), out=out[:, first:last])
    return out if bias is None else out.add_(bias)


def decode(part: Stored, first: int, last: int, like: Tensor) -> Float[Tensor, "outputs inputs"]:
    """Return some outputs of a matrix in codes as plain numbers, in the dtype and on the device of another tensor."""
    found = torch.empty(last - first, part.inputs, dtype=like.dtype, device=like.device)
    decode_into(part, first, found)
    return found


def decode_into(part: Stored, first: int, found: Float[Tensor, "outputs inputs"]) -> None:
    """Fill `found` with the outputs from `first` on."""
    own = named(found=found, first=first, last=first + len(found))
    packed, form = form_of(part), tiles.form_of(part)
    if packed is not None:
        decode_kernel[(-(-len(found) // OUTPUTS), -(-part.inputs // TILE_INPUTS))](
            pointers(part), own, named(inputs=part.inputs), OUTPUTS=OUTPUTS, **packed, num_warps=4, **early(found)
        )
        return
    assert form is not None
    decode_tiles_kernel[(-(-len(found) // OUTPUTS), -(-part.inputs // form.step))](
        pointers(part), own, named(outputs=part.outputs, inputs=part.inputs),
        OUTPUTS=OUTPUTS, **form.constants, num_warps=4, **early(found),
    )  # fmt: skip


@jit(do_not_specialize=["first", "last"])
def decode_kernel(
    codes, scales, more, found, first, last, inputs, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (outputs, 128 inputs)."""
    wait(EARLY)
    WORDS: tl.constexpr = STEP // (2 * PAIRS)
    PARTS: tl.constexpr = RUNS if FORMAT == "int4" or FORMAT == "int8" else 1
    output, step = first + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    line, word = tl.minimum(output, last - 1), tl.arange(0, WORDS)
    target = found + (output - first).to(tl.int64)[:, None] * inputs
    owned, stride = scales_of(line, inputs, FORMAT, BLOCK_ROWS, RUNS)
    words = tl.load(words_of(codes, line, step, inputs, WORDS)[:, None] + word[None, :])
    factor = factor_of(scales, more, line, FORMAT, RUNS)
    for run in tl.static_range(PARTS):
        place = owned + step * stride + run * TILE
        scale = scale_at(scales, place) if RUNS > 0 else factor
        zero = zero_at(scales, more, place, FORMAT)
        for pair in tl.static_range(run * PAIRS // PARTS, (run + 1) * PAIRS // PARTS):
            column = tl.arange(0, 2 * WORDS) + step * STEP + pair * 2 * WORDS
            numbers = numbers_of(words, scale, zero, factor, pair, FORMAT, PAIRS, True, OUTPUTS)
            real = (output < last)[:, None] & (column < inputs)[None, :]
            tl.store(target + column[None, :], numbers.to(found.dtype.element_ty), mask=real)


@jit(do_not_specialize=["first", "last"])
def decode_tiles_kernel(
    codes, scales, more, found, first, last, outputs, inputs, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (outputs, inputs of a tile)."""
    wait(EARLY)
    output = first + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    tile, scale = load_tile(codes, scales, more, 0, output, column, outputs, inputs, FORMAT, BLOCK_ROWS, BLOCK_COLUMNS)
    numbers = (tile.to(tl.float32) * scale[:, None]).to(found.dtype.element_ty)
    target = found + (output - first).to(tl.int64)[:, None] * inputs + column[None, :]
    tl.store(target, numbers, mask=(output < last)[:, None] & (column < inputs)[None, :])
