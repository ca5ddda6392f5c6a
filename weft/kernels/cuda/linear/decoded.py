"""Matmuls of thousands of rows with packed weights: decoded piece by piece, and multiplied by torch's library.

A piece is decoded into memory that is freed right after. Its numbers are rounded to the dtype of the rows.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.formats.codes import STEP, form_of, numbers_of, scales_of, words_of
from weft.kernels.cuda.formats.packed import LINES
from weft.kernels.cuda.formats.packed import STEP as TILE_INPUTS
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
    """Return some outputs of a packed matrix as plain numbers, in the dtype and on the device of another tensor."""
    found = torch.empty(last - first, part.inputs, dtype=like.dtype, device=like.device)
    decode_into(part, first, found)
    return found


def decode_into(part: Stored, first: int, found: Float[Tensor, "outputs inputs"]) -> None:
    form = form_of(part)
    assert form is not None
    codes, scales = part.tensors
    decode_kernel[(-(-len(found) // OUTPUTS), -(-part.inputs // TILE_INPUTS))](
        named(codes=codes, scales=scales, found=found, first=first, last=first + len(found), inputs=part.inputs),
        OUTPUTS=OUTPUTS, **form, num_warps=4, **early(found),
    )  # fmt: skip


@jit(do_not_specialize=["first", "last"])
def decode_kernel(
    codes, scales, found, first, last, inputs,
    OUTPUTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (outputs, 128 inputs)."""
    wait(EARLY)
    PAIRS: tl.constexpr = 2 if FORMAT == "fp8" else 4
    WORDS: tl.constexpr = STEP // (2 * PAIRS)
    output, step = first + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    line, word = tl.minimum(output, last - 1), tl.arange(0, WORDS)
    target = found + (output - first).to(tl.int64)[:, None] * inputs
    owned, stride = scales_of(scales, line, inputs, FORMAT, BLOCK_ROWS)
    words = tl.load(words_of(codes, line, step, inputs, WORDS)[:, None] + word[None, :])
    scale = tl.load(owned + step * stride)
    for pair in tl.static_range(PAIRS):
        column = tl.arange(0, 2 * WORDS) + step * STEP + pair * 2 * WORDS
        numbers = numbers_of(words, scale, pair, FORMAT, True, OUTPUTS).to(found.dtype.element_ty)
        tl.store(target + column[None, :], numbers, mask=(output < last)[:, None] & (column < inputs)[None, :])
