"""Matmuls with weights, by our own kernels where they are faster than torch's library.

Those are matmuls of few rows, and matmuls with an activation. There is a kernel for one row (`linear_one`), for few
(`linear_few`), for some dozens (`linear_some`), which read the weights once, and for hundreds (`linear_many`). All of
them let the next kernel start before they end.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES, Function
from weft.kernels.cuda.activation import gated_product
from weft.kernels.cuda.formats.lines import prepared
from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.cuda.linear.few import MOST_ROWS, are_few, few_rows
from weft.kernels.cuda.linear.many import MANY_ROWS, are_many, many_rows
from weft.kernels.cuda.linear.one import one_row
from weft.kernels.cuda.linear.rounding import LazyProduct
from weft.kernels.cuda.linear.some import are_parted, are_some, rows_in_parts, some_rows
from weft.kernels.cuda.linear.stored import activated_stored, lazy_product, multiply_stored, stored_into_stream
from weft.kernels.cuda.linear.tiles import tiled
from weft.kernels.cuda.norm import LazyNorm, rows_of
from weft.kernels.formats.rounded import NOTHING
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight

# Measured on an H200: up to this number of outputs our kernels are faster than the library. The limit is higher for one
# row, and lower for more than 16 rows on smaller GPUs.
MANY_OUTPUTS, MANY_OF_ONE, MANY_ELSEWHERE = 24576, 32768, 4096
# Number of weights up to which one row's matmul is faster with its norm fused than after it: with up to NARROW inputs,
# and beyond. With more inputs than WIDEST a thread runs out of registers.
NARROW, WIDEST = 2048, 8192
# With a number of outputs that is not a multiple of this, the library takes five times as long (1,089 of 2,048 inputs).
ALIGNED = 8
NORMING, NORMING_WIDE = 40 << 20, 8 << 20


def prepare(weight: Weight, twice: bool, rounds: Set[str] = NOTHING) -> Weight:
    """Return weights with their codes in the order in which kernels read them. `rounds`: what rows are rounded to."""
    return replace(weight, parts=tuple(prepared(part, rounds) for part in weight.parts))


def linear(x: Normed, weight: Weight) -> Float[Tensor, "*n outputs"]:
    matrix = weight.matrix
    if matrix is None:
        return multiply_stored(rows_of(x), weight)
    rows = for_matmul(x, matrix)
    if isinstance(rows, LazyNorm) or suits(rows, matrix):
        return matmul(rows, matrix, weight.bias)
    if is_uneven(rows, matrix):
        return tiled(rows, matrix, weight.bias)
    return F.linear(rows, matrix, weight.bias)


def is_uneven(x: Float[Tensor, "*n inputs"], weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Return whether the library would be slow: it needs lines of outputs that are aligned to 16 bytes."""
    half = weight.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    return half and len(weight) % ALIGNED != 0 and x.ndim == 2 and x.stride(1) == weight.stride(1) == 1


def linear_into_stream(x: Normed, weight: Weight) -> Addend:
    matrix = weight.matrix
    if matrix is None:
        return stored_into_stream(x if isinstance(x, LazyProduct) else rows_of(x), weight)
    x = rows_of(x)
    if suits(x, matrix):
        return matmul(x, matrix, weight.bias, summed=False)
    if are_parted(x, matrix):
        return rows_in_parts(x, matrix, weight.bias)
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Normed:
    matrix = weight.matrix
    rows = rows_of(x) if matrix is None else for_matmul(x, matrix)
    if matrix is not None and activation in NAMES and suits(rows, matrix, activated=True):
        return matmul(rows, matrix, weight.bias, NAMES[activation], parts)
    if matrix is None:
        assert isinstance(rows, Tensor)
        found = activated_stored(rows, weight, activation, parts)
        if found is not None:
            return found
    projected = linear(rows, weight)
    gate, up = projected.chunk(2, -1) if parts == 2 else (projected, None)
    if activation in NAMES:
        return lazy_product(NAMES[activation], gate, up, weight)
    return activation(gate) if up is None else gated_product(gate, up, activation)


def for_matmul(x: Normed, weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "n inputs"] | LazyNorm:
    """Return the input of a matmul with these weights: rows, or a norm that the matmul computes itself."""
    if isinstance(x, LazyNorm):
        return x if can_norm(x, weight) else x.computed()
    assert isinstance(x, Tensor)
    return x


def can_norm(x: LazyNorm, weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Return whether `matmul` should compute this norm itself."""
    inputs = weight.shape[1]
    most = NORMING if inputs <= NARROW else NORMING_WIDE
    return inputs <= WIDEST and x.result is None and weight.numel() <= most and suits(x, weight)


def suits(
    x: Float[Tensor, "rows inputs"] | LazyNorm, weight: Float[Tensor, "outputs inputs"], activated: bool = False
) -> bool:
    """Return whether `matmul`, with an activation or without, is faster. Needs nothing from the device."""
    if isinstance(x, LazyNorm):
        x = x.x
    if not are_few(x, weight):
        return activated and (are_some(x, weight) or are_many(x, weight))
    if len(x) == 1:
        return len(weight) <= MANY_OF_ONE
    return len(weight) <= (MANY_OUTPUTS if len(x) <= 16 or gpu_of(x.device).is_roomy else MANY_ELSEWHERE)


def matmul(
    x: Float[Tensor, "rows inputs"] | LazyNorm,
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    activation: str | None = None,
    parts: int = 1,
    summed: bool = True,
) -> Float[Tensor, "*shares rows results"]:
    """Return the matmul; with a named activation, activation(matmul) or, of two parts, activation(first) * second.

    Without `summed`, it may come in parts that are still to be added up.
    """
    if isinstance(x, LazyNorm) or len(x) == 1:
        return one_row(x, weight, bias, activation, parts)
    if len(x) <= MOST_ROWS:
        return few_rows(x, weight, bias, activation, parts, summed)
    assert activation is not None, "longer products are the library's"
    if len(x) in MANY_ROWS:
        return many_rows(x, weight, bias, activation, parts)
    return some_rows(x, weight, bias, activation, parts)
