"""Loader of tiles of FP8."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.formats.fp8 import Fp8


def fp8_form(format: Fp8, inputs: int, step: int) -> tuple[int, int, int]:
    """Return the size of a block, and the inputs of a tile, which lies in one block.

    >>> fp8_form(Fp8(128, 128), 300, 128), fp8_form(Fp8(1, 300), 300, 128), fp8_form(Fp8(24, 40), 300, 128)
    ((128, 128, 128), (1, 300, 128), (24, 40, 8))
    """
    while format.block_columns < inputs and format.block_columns % step:
        step //= 2
    return format.block_rows, format.block_columns, step


@triton.jit
def fp8_tile(
    codes, scales, expert, output, column, outputs, inputs, real, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    place = (expert * outputs + output).to(tl.int64)[:, None] * inputs + column[None, :]
    # All numbers of eight bits have such bits in 16.
    tile = tl.load(codes + place, mask=real, other=0.0).to(tl.float32)
    rows, columns = tl.cdiv(outputs, BLOCK_ROWS), tl.cdiv(inputs, BLOCK_COLUMNS)
    block = (expert * rows + output // BLOCK_ROWS).to(tl.int64) * columns + tl.min(column, 0) // BLOCK_COLUMNS
    scale = tl.load(scales + block, mask=output < outputs, other=0.0)
    return tile, scale
