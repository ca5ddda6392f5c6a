"""Pages of codes (`weft/kernels/pages.py`), for kernels that write and read them.

A power of two belongs to each token and head. It commutes with all rounding: that of a key multiplies the key's scores,
and that of a value its weights. Without exponents (None) pages hold numbers of the model's dtype.

Where speed matters codes are read as words of two neighbouring features, which become two tiles, of even features and
of odd ones. A tensor core wants pairs of tokens, or of features, in a register: words of 16 bits arrive there as
numbers of 16 bits do, whereas single bytes would be gathered one by one. What they are multiplied with is in float16,
which few instructions make of codes: queries and weights are brought into its range by powers of two.
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
BROKEN_HEAD, BIAS_EXPONENT = tl.constexpr(BROKEN), tl.constexpr(BIAS)
# Of a pair of words, $2: two float16, $0, of their low bytes, and two, $1, of their high ones. One instruction of the
# GPU converts two e4m3 that lie side by side.
HALVES_OF_CODES = tl.constexpr(
    "{ .reg .b32 u; .reg .b16 l, h; prmt.b32 u, $2, 0, 0x3120; mov.b32 {l, h}, u;"
    " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
# Of integers: a code plus 128 is the mantissa of a float16 from 1024 on, whose high byte is 0x64.
HALVES_OF_INTEGERS = tl.constexpr(
    "{ .reg .b32 u, v, c; xor.b32 v, $2, 0x80808080; prmt.b32 u, v, 0x64646464, 0x4240;"
    " prmt.b32 v, v, 0x64646464, 0x4341; mov.b32 c, 0x64806480; sub.rn.f16x2 $0, u, c; sub.rn.f16x2 $1, v, c; }"
)
# Powers of two for queries in float16: the largest number of a line gets this exponent, and no line is multiplied with
# more than what makes that of one with the other.
QUERY_EXPONENT, LEAST_QUERY = tl.constexpr(14), tl.constexpr(30)
# Powers of values below this one do not move the peak of scores.
LEAST_RISE = tl.constexpr(-64)


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
    if PORTABLE or dtype != tl.float16:
        bits = words.to(tl.int32)
        low = (bits & 255).to(tl.uint8).to(KIND, bitcast=True).to(dtype)
        high = ((bits >> 8) & 255).to(tl.uint8).to(KIND, bitcast=True).to(dtype)
    else:
        assembly: tl.constexpr = HALVES_OF_INTEGERS if tl.int8 == KIND else HALVES_OF_CODES
        low, high = tl.inline_asm_elementwise(
            assembly, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def in_float16(lines):
    """Return lines times powers of two that make the most of float16, and the inverse powers.

    What has less than 2**-38 of the largest number of its line may be rounded, as the sum of its products is.
    """
    wide = lines.to(tl.float32)
    exponent = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000) >> 23
    exponent = tl.maximum(exponent, LEAST_QUERY)
    power = power_of(-exponent + (QUERY_EXPONENT + INVERSE))
    return (wide * power[:, None]).to(tl.float16), power_of(exponent - QUERY_EXPONENT)


@triton.jit
def halves_of(tile, LINES: tl.constexpr, FEATURES: tl.constexpr):
    """Return the even features of a tile [lines, features], and the odd ones."""
    return tl.split(tl.reshape(tile, (LINES, FEATURES // 2, 2)))


@triton.jit
def powers_at(exponents, place, there):
    """Return the powers of two of some tokens of a head; `there` may be None."""
    found = tl.load(exponents + place) if there is None else tl.load(exponents + place, mask=there, other=BIAS_EXPONENT)
    return power_of(found)


@triton.jit
def powers_in_words(exponents, place, there):
    """Return what `powers_at` does, or 0 for masked tokens: by words of four, whose loads can be spread over stages."""
    words = tl.load((exponents + place // 4 * 4).to(tl.pointer_type(tl.int32), bitcast=True), mask=there, other=0)
    return power_of((words >> (place % 4 * 8).to(tl.int32)) & 255)


@triton.jit
def rise_of(powers):
    """Return the logarithms of powers of two, to base 2, that of infinity infinite."""
    exponent = powers.to(tl.int32, bitcast=True) >> 23
    rise = tl.maximum(exponent - BIAS_EXPONENT, LEAST_RISE).to(tl.float32)
    return tl.where(exponent == BROKEN_HEAD, float("inf"), rise)
