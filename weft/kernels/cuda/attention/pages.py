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


# Variants. Two numbers each, $0 of the low bytes and $1 of the high ones, of a pair of words, $2.
# bfloat16 of e4m3, times 2**-120.
MOVED_CODES = tl.constexpr(
    "{ .reg .b32 u, v, w; mov.b32 w, $2; shl.b32 u, w, 4; shl.b32 v, w, 8; and.b32 v, v, 0x80008000;"
    " lop3.b32 $0, u, 0x07f007f0, v, 0xea; shr.b32 u, w, 4; and.b32 v, w, 0x80008000;"
    " lop3.b32 $1, u, 0x07f007f0, v, 0xea; }"
)
HALF_CODES = tl.constexpr(
    "{ .reg .b32 p; .reg .b16 l, h; prmt.b32 p, $2, 0, 0x3120; mov.b32 {l, h}, p;"
    " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
MOVED_INTEGERS = tl.constexpr(
    "{ .reg .b32 u, v, w, c, d; mov.b32 w, $2; mov.b32 c, 0x43004300; mov.b32 d, 0xbf80bf80;"
    " lop3.b32 u, w, 0x007f007f, c, 0xea; lop3.b32 v, w, 0x00800080, c, 0xea; fma.rn.bf16x2 $0, v, d, u;"
    " shr.b32 w, w, 8; lop3.b32 u, w, 0x007f007f, c, 0xea; lop3.b32 v, w, 0x00800080, c, 0xea;"
    " fma.rn.bf16x2 $1, v, d, u; }"
)
HALF_INTEGERS = tl.constexpr(
    "{ .reg .b32 x, u, v, c; xor.b32 x, $2, 0x80808080; mov.b32 c, 0x64806480; prmt.b32 u, x, 0x64646464, 0x4240;"
    " prmt.b32 v, x, 0x64646464, 0x4341; sub.rn.f16x2 $0, u, c; sub.rn.f16x2 $1, v, c; }"
)


MOVED_UNIT = tl.constexpr(1.0 if PORTABLE else 2.0**120)


@triton.jit
def in_float16(q):
    """Return lines times powers of two that make their largest number one of 2**14 to 2**15, and inverse powers."""
    wide = q.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
    largest = tl.maximum(largest, 30 << 23)
    power = ((141 << 23) - largest + (127 << 23)).to(tl.float32, bitcast=True)
    inverse = (largest - (14 << 23)).to(tl.float32, bitcast=True)
    return (wide * power[:, None]).to(tl.float16), inverse


@triton.jit
def numbers_by(words, dtype: tl.constexpr, KIND: tl.constexpr, BY: tl.constexpr):
    """Return the even features of words of two codes, and the odd ones, times `unit_of`."""
    if BY == "now" or PORTABLE or dtype == tl.float32:
        low, high = numbers_of(words, dtype, KIND)
    else:
        half: tl.constexpr = HALF_INTEGERS if tl.int8 == KIND else HALF_CODES
        moved: tl.constexpr = MOVED_INTEGERS if tl.int8 == KIND else MOVED_CODES
        if dtype == tl.float16:
            low, high = tl.inline_asm_elementwise(
                half, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            low, high = tl.inline_asm_elementwise(
                moved, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
    return low, high


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


@triton.jit
def power_in_word(exponents, place, there):
    """Return powers of two as `powers_at` does, by words of four: only such loads are spread over stages.

    A masked token has a power of zero.
    """
    words = tl.load((exponents + place // 4 * 4).to(tl.pointer_type(tl.int32), bitcast=True), mask=there, other=0)
    return (((words >> (place % 4 * 8).to(tl.int32)) & 255) << 23).to(tl.float32, bitcast=True)


BIAS_BYTE = tl.constexpr(BIAS)
