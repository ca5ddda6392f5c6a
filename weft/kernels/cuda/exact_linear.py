"""Matmuls whose bits do not depend on the number of rows: every output is one sum over its inputs, in their order.

Tensor cores give such a sum the same bits in every tile, and so does the library wherever it does not split the
inputs; `python -m benchmarks.exact_sums` shows both on a GPU. So the number of rows may decide who multiplies, but
never whether a sum is split. The kernels for one row (`linear_one`) add in another order and are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES, Function
from weft.kernels.cuda.activation import activate, gated_product
from weft.kernels.cuda.exact_norm import rows_of
from weft.kernels.cuda.exact_tiles import tiled
from weft.kernels.cuda.gpus import H200, HOPPER, Gpu, gpu_of
from weft.kernels.cuda.linear import prepare
from weft.kernels.cuda.linear_few import MOST_ROWS, Cut, are_few, few_rows, rows_compiled
from weft.kernels.cuda.linear_some import are_some, can_describe, some_rows
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

__all__ = ["activated_linear", "linear", "linear_into_stream", "prepare"]

Way = Literal["few", "tiles", "library"]
# Sizes for which the library was seen to keep sums whole, on an H200: any number of rows with this many outputs, or
# this many rows.
WIDE_OUTPUTS, MANY_ROWS = 6144, 512
# Below these, nothing was measured.
LEAST_OUTPUTS, LEAST_INPUTS = 1024, 512
# The library's settings: whether partial sums may be rounded, and whether sums may be split.
REDUCTIONS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}
# Outputs per program of a few rows, and the inputs that it multiplies at a time.
WIDTHS = {16: 512, 32: 256, 64: 128}


def linear(x: Normed, weight: Weight) -> Float[Tensor, "n outputs"]:
    rows = rows_of(x)
    if rows.ndim != 2:
        found: Tensor = product(rows.reshape(-1, rows.shape[-1]), weight).unflatten(0, rows.shape[:-1])
        return found
    return product(rows, weight)


def linear_into_stream(x: Float[Tensor, "n inputs"], weight: Weight) -> Float[Tensor, "n outputs"]:
    """Multiply for the residual stream. There are no partial sums: their number would depend on the rows."""
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    rows = rows_of(x)
    matrix, bias = weight.matrix, weight.bias
    if activation in NAMES and are_few(rows, matrix):
        by = cut(len(rows), len(matrix), gpu_of(rows.device))
        return few_rows(rows, matrix, bias, NAMES[activation], parts, by=by)
    if activation in NAMES and are_some(rows, matrix):
        return some_rows(rows, matrix, bias, NAMES[activation], parts)
    projected = product(rows, weight)
    if parts == 2:
        gate, gated = projected.chunk(2, -1)
        return gated_product(gate, gated, activation)
    return activate(NAMES[activation], projected) if activation in NAMES else activation(projected)


def product(x: Float[Tensor, "rows inputs"], weight: Weight) -> Float[Tensor, "rows outputs"]:
    matrix, bias = weight.matrix, weight.bias
    gpu = gpu_of(x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    way = way_of(len(x), len(matrix), matrix.shape[1], gpu)
    if way == "few" and are_few(x, matrix):
        return few_rows(x, matrix, bias, by=cut(len(x), len(matrix), gpu))
    if way == "library" and x.is_cuda and x.dtype in REDUCTIONS and can_describe(x, matrix):
        with unsplit(x.dtype):
            return F.linear(x, matrix, bias)
    return tiled(x, matrix, bias)


def way_of(rows: int, outputs: int, inputs: int, gpu: Gpu = H200) -> Way:
    """Return who multiplies; all of them give the same bits.

    >>> way_of(1, 2048, 8192), way_of(128, 2048, 8192), way_of(128, 16384, 2048), way_of(8192, 2048, 8192)
    ('few', 'tiles', 'library', 'library')
    """
    if rows <= MOST_ROWS:
        return "few"
    known = gpu.capability == HOPPER and outputs >= LEAST_OUTPUTS and inputs >= LEAST_INPUTS
    aligned = outputs % 8 == 0 and inputs % 8 == 0
    whole = outputs >= WIDE_OUTPUTS or rows >= MANY_ROWS
    return "library" if known and aligned and whole else "tiles"


def cut(rows: int, outputs: int, gpu: Gpu = H200) -> Cut:
    """Return a division into programs by outputs alone: a narrow layer gets narrow programs, which read far ahead.

    >>> cut(1, 2048), cut(32, 15680)
    (Cut(width=16, shares=1, inputs=512, warps=4, stages=4), Cut(width=64, shares=1, inputs=128, warps=4, stages=4))
    """
    if not gpu.is_roomy:
        return Cut(64, 1, 64, 4, 3)
    width = next((w for w in sorted(WIDTHS, reverse=True) if outputs >= w * gpu.multiprocessors * 3 // 4), 16)
    inputs = WIDTHS[width] if rows_compiled(rows) == 16 else min(WIDTHS[width], 128)
    return Cut(width, 1, inputs, 4, 4)


@contextmanager
def unsplit(dtype: torch.dtype) -> Iterator[None]:
    """Keep the library from splitting a sum. Only cuBLASLt can be told so."""
    settings, name = torch.backends.cuda.matmul, REDUCTIONS[dtype]
    library = torch.backends.cuda.preferred_blas_library()
    before = getattr(settings, name), getattr(settings, f"{name}_split_k")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    setattr(settings, name, (False, False))
    try:
        yield
    finally:
        setattr(settings, name, before)
        torch.backends.cuda.preferred_blas_library(library)
