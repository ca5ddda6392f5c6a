"""Pages of codes (`weft/kernels/pages.py`), for kernels that write and read them.

A power of two belongs to each token and head. It commutes with all rounding: that of a key multiplies the key's scores,
and that of a value its weights. Without exponents (None) pages hold numbers of the model's dtype.

Where speed matters codes are read as words of two neighbouring features, which become two tiles, of even features and
of odd ones. A tensor core wants pairs of tokens, or of features, in a register: words of 16 bits arrive there as
numbers of 16 bits do, whereas single bytes would be gathered one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.cuda.formats.codes import PORTABLE
from weft.kernels.cuda.formats.fp8 import code_of
from weft.kernels.pages import BIAS, BROKEN, LARGEST

LARGEST_FLOAT, LARGEST_INTEGER = (tl.constexpr(LARGEST[kind]) for kind in (torch.float8_e4m3fn, torch.int8))
# Of an exponent: the bits of a power of two, and of its inverse, must be those of a number that is not subnormal.
MOST_EXPONENT, INVERSE = tl.constexpr(2 * BIAS - 1), tl.constexpr(2 * BIAS)
BROKEN_HEAD = tl.constexpr(BROKEN)
# Two bfloat16, $0, of the low bytes, or the high ones, of a pair of words, $1. An e4m3 ends at bit 4 of a bfloat16,
# whose bias is 120 more.
LOW_CODES = tl.constexpr(
    "{ .reg .b32 u, v, c, z; and.b32 u, $1, 0x007f007f; shl.b32 u, u, 4; and.b32 v, $1, 0x00800080; shl.b32 v, v, 8;"
    " or.b32 u, u, v; mov.b32 c, 0x7b807b80; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, u, c, z; }"
)
HIGH_CODES = tl.constexpr(
    "{ .reg .b32 u, v, c, z; shr.b32 u, $1, 4; and.b32 u, u, 0x07f007f0; and.b32 v, $1, 0x80008000;"
    " or.b32 u, u, v; mov.b32 c, 0x7b807b80; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, u, c, z; }"
)
# Of integers: seven bits of a code are those of a bfloat16 from 128 on, and its sign stands for 128 less.
INTEGERS_OF = (
    "and.b32 v, u, 0x00800080; and.b32 u, u, 0x007f007f; or.b32 u, u, 0x43004300; or.b32 v, v, 0x43004300;"
    " mov.b32 c, 0xbf80bf80; fma.rn.bf16x2 $0, v, c, u; }"
)
LOW_INTEGERS = tl.constexpr("{ .reg .b32 u, v, c; mov.b32 u, $1; " + INTEGERS_OF)
HIGH_INTEGERS = tl.constexpr("{ .reg .b32 u, v, c; shr.b32 u, $1, 8; " + INTEGERS_OF)


@triton.jit
def size_of(value):
    """Return how large numbers are, as bits: those of infinity, and of what is no number, are the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_for(size, KIND: tl.constexpr):
    """Return the least exponent with which a number of this size is not larger than the largest code."""
    largest: tl.constexpr = LARGEST_INTEGER if tl.int8 == KIND else LARGEST_FLOAT
    bits = (size.to(tl.float32, bitcast=True) / largest).to(tl.int32, bitcast=True)
    found = tl.minimum(tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 1), MOST_EXPONENT)
    return tl.where(size < 0x7F800000, found, BROKEN_HEAD)


@triton.jit
def power_of(exponent):
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def coded(value, exponent, KIND: tl.constexpr):
    """Return the codes of numbers, rounded to the nearest, of two to the even one."""
    value *= power_of(-exponent + INVERSE)
    size = tl.abs(value)
    if tl.int8 == KIND:
        # Adding 1.5 * 2**23 leaves an integer in the lowest bits. What is no number has any code.
        whole = tl.where(size <= LARGEST_INTEGER, value, LARGEST_INTEGER) + 12582912.0
        found = (whole.to(tl.int32, bitcast=True) & 255).to(tl.uint8).to(tl.int8, bitcast=True)
    else:
        found = code_of(value)
    return found


@triton.jit
def numbers_of(words, dtype: tl.constexpr, KIND: tl.constexpr):
    """Return the even features of words of two codes, and the odd ones."""
    if PORTABLE or dtype != tl.bfloat16:
        bits = words.to(tl.int32)
        low = (bits & 255).to(tl.uint8).to(KIND, bitcast=True).to(dtype)
        high = ((bits >> 8) & 255).to(tl.uint8).to(KIND, bitcast=True).to(dtype)
    else:
        for_low: tl.constexpr = LOW_INTEGERS if tl.int8 == KIND else LOW_CODES
        for_high: tl.constexpr = HIGH_INTEGERS if tl.int8 == KIND else HIGH_CODES
        low = tl.inline_asm_elementwise(for_low, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(for_high, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return low, high


@triton.jit
def halves_of(tile, LINES: tl.constexpr, FEATURES: tl.constexpr):
    """Return the even features of a tile [lines, features], and the odd ones."""
    return tl.split(tl.reshape(tile, (LINES, FEATURES // 2, 2)))


@triton.jit
def powers_at(exponents, place, there):
    """Return the powers of two of some tokens of a head; `there` may be None."""
    found = tl.load(exponents + place) if there is None else tl.load(exponents + place, mask=there, other=BIAS_BYTE)
    return power_of(found)


BIAS_BYTE = tl.constexpr(BIAS)
