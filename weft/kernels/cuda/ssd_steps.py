"""The time step of the state space recurrence, from what the layer's projection gives.

Decays are kept as logarithms to the base 2, whose exponential is what a GPU computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def time_step(raw, bias, low, high):
    """softplus(raw + bias) within limits; without a bias, `raw` is the time step itself."""
    step = raw.to(tl.float32)
    if bias is not None:
        step += bias
        grown = tl.exp(step)
        plus_one = 1.0 + grown
        # The sum rounds a small exponential away; the quotient gives back what the logarithm then lacks.
        exact = plus_one == 1.0
        logarithm = tl.log(plus_one) * (grown / tl.where(exact, 1.0, plus_one - 1.0))
        step = tl.where(step > 20.0, step, tl.where(exact, grown, logarithm))
        step = tl.minimum(tl.maximum(step, low), high)
    return step
