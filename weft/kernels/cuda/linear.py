"""Products with weights that are faster here than in the library that torch brings: of few rows, and activated ones.

By the number of rows: one, a few, some. What they have in common is that a step reads its weights once, and that the
next kernel can start before this one ends.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.linear_few import MOST_ROWS, are_few, few_rows, is_roomy
from weft.kernels.cuda.linear_one import one_row
from weft.kernels.cuda.linear_some import are_some, some_rows
from weft.kernels.stream import LazyNorm

# Measured on an H200: up to so many outputs faster than the library. Of one row, more; with more than 16 rows on
# smaller GPUs, fewer.
MANY_OUTPUTS, MANY_OF_ONE, MANY_ELSEWHERE = 24576, 32768, 4096
# Weights up to which one row's product is faster with a norm to compute than behind it: with up to NARROW inputs, and
# beyond. With more inputs than WIDEST a thread has no registers for them.
NARROW, WIDEST = 2048, 8192
NORMING, NORMING_WIDE = 40 << 20, 8 << 20


def can_norm(x: LazyNorm, weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Whether `product` is to compute this norm on its way."""
    inputs = weight.shape[1]
    most = NORMING if inputs <= NARROW else NORMING_WIDE
    return inputs <= WIDEST and x.result is None and weight.numel() <= most and suits(x, weight)


def suits(
    x: Float[Tensor, "rows inputs"] | LazyNorm, weight: Float[Tensor, "outputs inputs"], activated: bool = False
) -> bool:
    """Whether `product`, with an activation or without, is the faster way. Known without asking the device."""
    if isinstance(x, LazyNorm):
        x = x.x
    if not are_few(x, weight):
        return activated and are_some(x, weight)
    if len(x) == 1:
        return len(weight) <= MANY_OF_ONE
    return len(weight) <= (MANY_OUTPUTS if len(x) <= 16 or is_roomy(x.device) else MANY_ELSEWHERE)


def product(
    x: Float[Tensor, "rows inputs"] | LazyNorm,
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    activation: str | None = None,
    parts: int = 1,
    summed: bool = True,
) -> Float[Tensor, "*shares rows results"]:
    """With an activation, by name: that of the product or, of two parts side by side, of the first times the second.

    Not `summed`: it may come in parts that are still to be added up.
    """
    if isinstance(x, LazyNorm) or len(x) == 1:
        return one_row(x, weight, bias, activation, parts)
    if len(x) <= MOST_ROWS:
        return few_rows(x, weight, bias, activation, parts, summed)
    assert activation is not None, "longer products are the library's"
    return some_rows(x, weight, bias, activation, parts)
