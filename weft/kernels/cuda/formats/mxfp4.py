"""Loader of tiles of MXFP4."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mxfp4_tile(codes, scales, expert, output, column, outputs, inputs):
    """Return one block of inputs, and its powers of two."""
    line = (expert * outputs + output).to(tl.int64)
    tile = four_bit_floats(codes, line, output, column, outputs, inputs)
    block = line * (inputs // 32) + tl.min(column, 0) // 32
    scale = tl.load(scales + block, mask=output < outputs, other=127).to(tl.int32)
    # The bits of a power of two; the least has none of its exponent.
    bits = tl.where(scale == 0, 1 << 22, scale << 23)
    return tile, bits.to(tl.float32, bitcast=True)


@triton.jit
def four_bit_floats(codes, line, output, column, outputs, inputs):
    """Return numbers of lines of pairs; zeros beyond the matrix."""
    real = (output < outputs)[:, None] & (column < inputs)[None, :]
    # The first of a pair is in the low half of its byte. Both of a pair read it.
    pair = tl.load(codes + line[:, None] * (inputs // 2) + (column // 2)[None, :], mask=real, other=0).to(tl.int32)
    code = (pair >> (column % 2 * 4)[None, :]) & 15
    exponent, last = (code >> 1) & 3, (code & 1).to(tl.float32)
    power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
    tile = tl.where(exponent == 0, 0.5 * last, (1.0 + 0.5 * last) * power)
    return tl.where(code >= 8, -tile, tile)
