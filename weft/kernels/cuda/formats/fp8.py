"""Loader of tiles of FP8."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.formats.fp8 import LARGEST, Fp8

LARGEST_CODE = tl.constexpr(LARGEST)


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


@triton.jit
def code_of(value):
    """Return the codes of numbers, rounded to the nearest, of two to the even one; larger ones are no numbers.

    Not every GPU has an instruction for that, and Triton's interpreter cuts numbers off.
    """
    size = tl.abs(value)
    bits = size.to(tl.int32, bitcast=True)
    # Three bits of the mantissa are left, and a carry goes on into the exponent, whose bias is 120 less. What has no
    # exponent of its own is a multiple of 2**-9, as is any float32 from 2**14 on.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < 0.015625, small, tl.where(size <= LARGEST_CODE, normal, 0x7F))
    code |= (value.to(tl.int32, bitcast=True) >> 24) & 128
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
