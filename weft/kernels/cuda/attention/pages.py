"""Pages in FP8 (`weft/kernels/pages.py`), for kernels that write and read them.

A power of two belongs to each token and head. It commutes with all rounding: that of a key multiplies the key's scores,
and that of a value its weights, so products are those of decoded pages to the bit. Without exponents (None) pages hold
numbers of the model's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.pages import BIAS, LARGEST

LARGEST_CODE = tl.constexpr(LARGEST)
# Of an exponent: the bits of a power of two, and of its inverse, must be those of a number that is not subnormal.
MOST_EXPONENT, INVERSE = tl.constexpr(2 * BIAS - 1), tl.constexpr(2 * BIAS)


@triton.jit
def exponent_for(largest):
    """Return the least exponent with which a number of this size is not larger than the largest code."""
    bits = (largest / LARGEST_CODE).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 1), MOST_EXPONENT)


@triton.jit
def power_of(exponent):
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def coded(value, exponent):
    """Return the codes of numbers, rounded to the nearest, of two to the even one."""
    value *= power_of(-exponent + INVERSE)
    size = tl.abs(value)
    bits = size.to(tl.int32, bitcast=True)
    # Three bits of the mantissa are left, and a carry goes on into the exponent, whose bias is 120 less. What has no
    # exponent of its own is a multiple of 2**-9, as is any float32 from 2**14 on.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < 0.015625, small, tl.where(size <= LARGEST_CODE, normal, 0x7F))
    code |= (value.to(tl.int32, bitcast=True) >> 24) & 128
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def powers_at(exponents, place, there):
    """Return the powers of two of some tokens of a head; `there` may be None."""
    found = tl.load(exponents + place) if there is None else tl.load(exponents + place, mask=there, other=BIAS_BYTE)
    return power_of(found)


BIAS_BYTE = tl.constexpr(BIAS)
