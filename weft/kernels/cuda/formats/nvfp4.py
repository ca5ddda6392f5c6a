"""Loader of tiles of NVFP4."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.cuda.formats.mxfp4 import four_bit_floats


@triton.jit
def nvfp4_tile(codes, scales, factors, expert, output, column, outputs, inputs):
    """Return one block of inputs, and its scales times the factors of the outputs."""
    is_output = output < outputs
    line = (expert * outputs + output).to(tl.int64)
    tile = four_bit_floats(codes, line, output, column, outputs, inputs)
    block = line * (inputs // 16) + tl.min(column, 0) // 16
    bits = tl.load(scales + block, mask=is_output, other=0).to(tl.int32)
    # A float of eight bits has four of exponent, biased by 7, and three of mantissa; the least has no exponent.
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).to(tl.float32)
    power = ((exponent + 117) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 0, mantissa * 0.001953125, (8.0 + mantissa) * power)
    factor = tl.load(factors + line, mask=is_output, other=0.0)
    return tile, tl.where(bits >= 128, -scale, scale) * factor
