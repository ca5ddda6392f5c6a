"""Floats as integers in the same order, so that a value and its index can be compared as one number."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rising_key(value):
    """Return the integer key of a float. Both zeros have one key, and NaN is above everything."""
    bits = (value.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
