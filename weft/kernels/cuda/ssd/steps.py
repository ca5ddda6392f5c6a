"""Common parts of the state space kernels: the time step, and states whose size is not a power of two.

Decays are base-2 logarithms, whose exponential a GPU computes natively. Along the state, tiles have BLOCK_STATE
elements, the next power of two; those from STATE on are loaded as 0 and never stored. If the two are equal, nothing
is compared and the code is that of a kernel without padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def time_step(raw, bias, low, high):
    """Return softplus(raw + bias) within limits; without a bias, `raw` is the time step itself."""
    step = raw.to(tl.float32)
    if bias is not None:
        step += bias
        grown = tl.exp(step)
        plus_one = 1.0 + grown
        # The sum rounds a small exponential away; the quotient restores what the logarithm then lacks.
        exact = plus_one == 1.0
        logarithm = tl.log(plus_one) * (grown / tl.where(exact, 1.0, plus_one - 1.0))
        step = tl.where(step > 20.0, step, tl.where(exact, grown, logarithm))
        step = tl.minimum(tl.maximum(step, low), high)
    return step


@triton.jit
def unpadded(mask, n, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr):
    """Return `mask` without the elements `n` that only pad a state."""
    return mask if STATE == BLOCK_STATE else mask & (n < STATE)


@triton.jit
def load_unpadded(at, n, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr):
    """Load the elements `n` of a state; the padding is 0."""
    return tl.load(at) if STATE == BLOCK_STATE else tl.load(at, mask=n < STATE, other=0.0)
