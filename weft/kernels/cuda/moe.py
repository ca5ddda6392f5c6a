"""Experts on a GPU, by the way that is fastest for so many tokens. Nothing here asks the device for anything.

Who was chosen decides which memory is read, never the shape of a launch, so a recorded step can be replayed.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.moe_choices import FEW_PAIRS, TILED_TOKENS, WHOLE_TOKENS, tiles, vectors
from weft.kernels.cuda.moe_few import few_experts
from weft.kernels.cuda.moe_many import can_group, many_experts
from weft.kernels.cuda.moe_some import some_experts
from weft.kernels.moe import Activation, Shared


def experts(
    x: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens k"],
    chosen: Int[Tensor, "tokens k"],
    first: Float[Tensor, "experts outer hidden"],
    second: Float[Tensor, "experts hidden inner"],
    activation: Activation,
    first_bias: Float[Tensor, "experts outer"] | None = None,
    second_bias: Float[Tensor, "experts hidden"] | None = None,
    shared: Shared | None = None,
) -> Float[Tensor, "tokens hidden"]:
    x = x.contiguous()
    inputs = (x, weights.contiguous(), chosen.contiguous(), first, second, activation, first_bias, second_bias, shared)
    (tokens, k), (count, hidden, inner) = chosen.shape, second.shape
    if not tokens:
        return x.new_empty(x.shape)
    if tokens == 1 or tokens * k <= FEW_PAIRS * count:
        return few_experts(*inputs, vectors(hidden, inner, k))
    if tokens > TILED_TOKENS and can_group(first, second):
        return many_experts(*inputs)
    return some_experts(*inputs, tiles(x.dtype, tokens, k, count), tiled=tokens > WHOLE_TOKENS)
