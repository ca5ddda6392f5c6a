"""Last step of a mixture of experts: each token's weighted expert outputs, added in the order of its choices.

A shared expert's output is added last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.activation import activate
from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear import linear as usual_linear
from weft.kernels.cuda.linear.between import sigmoid
from weft.kernels.experts import SharedExpert
from weft.kernels.weight import Weight

BLOCK = 1024


def weighted_sum(
    results: Float[Tensor, "pairs hidden"],
    weights: Float[Tensor, "tokens k"],
    shared: SharedExpert | None = None,
    place: Int[Tensor, "tokens k"] | None = None,
    chosen: Int[Tensor, "tokens k"] | None = None,
    bias: Float[Tensor, "experts hidden"] | None = None,
    linear: Callable[[Tensor, Weight], Tensor] = usual_linear,
) -> Float[Tensor, "tokens hidden"]:
    """Return the weighted sums. The output of pair p is at place[p], or at p; its expert's bias is added if there is
    one. `linear` multiplies for the shared expert.
    """
    (tokens, k), hidden = weights.shape, results.shape[1]
    out = torch.empty(tokens, hidden, dtype=results.dtype, device=results.device)
    made = None if shared is None else linear(activate("silu", shared.gate, shared.up), shared.second)
    opening = None if shared is None else shared.opening
    block = min(BLOCK, power_of_two(hidden))
    weighted_sum_kernel[(tokens, -(-hidden // block))](
        named(
            results=results, weights=weights, place=place, chosen=chosen, bias=bias, made=made, opening=opening,
            out=out, opening_stride=0 if opening is None else opening.stride(0),
        ),
        K=k, HIDDEN=hidden, BLOCK=block, num_warps=4, **early(results),
    )  # fmt: skip
    return out


@jit
def weighted_sum_kernel(
    results, weights, place, chosen, bias, made, opening, out, opening_stride,
    K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        row = pair
        if place is not None:
            row = tl.load(place + pair).to(tl.int64)
        value = tl.load(results + row * HIDDEN + column, mask=real, other=0.0).to(tl.float32)
        if bias is not None:
            expert = tl.load(chosen + pair).to(tl.int64)
            value += tl.load(bias + expert * HIDDEN + column, mask=real, other=0.0).to(tl.float32)
        total += tl.load(weights + pair).to(tl.float32) * value
    if made is not None:
        value = tl.load(made + token * HIDDEN + column, mask=real, other=0.0).to(tl.float32)
        if opening is not None:
            value = value * sigmoid(tl.load(opening + token * opening_stride).to(tl.float32))
        total += value
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=real)
