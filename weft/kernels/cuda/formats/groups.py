"""Loader of tiles of integers in groups."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.formats.groups import Grouped


def step_of(format: Grouped, inputs: int, step: int) -> int:
    """Return the inputs of a tile, which lies in one group.

    >>> step_of(Grouped(4, 128), 300, 128), step_of(Grouped(4, 300), 300, 128), step_of(Grouped(4, 96), 300, 128)
    (128, 128, 32)
    """
    while format.group < inputs and format.group % step:
        step //= 2
    return step


@triton.jit
def grouped_tile(
    codes, scales, zeros, expert, output, column, outputs, inputs, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """Return codes less their zero, which are exact in 16 bits, and the scales of their group."""
    is_output, real = output < outputs, (output < outputs)[:, None] & (column < inputs)[None, :]
    line = (expert * outputs + output).to(tl.int64)
    if BITS == 4:
        # The first of a pair is in the low half of its byte. Both of a pair read it.
        pair = tl.load(codes + line[:, None] * tl.cdiv(inputs, 2) + (column // 2)[None, :], mask=real, other=0)
        code = (pair.to(tl.int32) >> (column % 2 * 4)[None, :]) & 15
    else:
        code = tl.load(codes + line[:, None] * inputs + column[None, :], mask=real, other=0).to(tl.int32)
    group = line * tl.cdiv(inputs, GROUP) + tl.min(column, 0) // GROUP
    scale = tl.load(scales + group, mask=is_output, other=0.0).to(tl.float32)
    if zeros is not None:
        code -= tl.load(zeros + group, mask=is_output, other=0).to(tl.int32)[:, None]
    else:
        code -= 1 << (BITS - 1)
    return tl.where(real, code, 0).to(tl.float32), scale
