"""Matmuls whose bits do not depend on the number of rows: every output is a sum over its inputs, in their order.

Tensor cores give such a sum the same bits in every tile, and so does the library wherever it does not split the
inputs; `tests/kernels/cuda/test_exact_cuda.py` compares them on a GPU. So the number of rows may decide which kernel
multiplies, but never how a sum is split. Narrow layers have too few outputs to keep a GPU busy; their sums are split
into a number of shares that the weights alone decide, added in order. The kernels for one row (`linear_one`) add in
another order and are not used.
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
from weft.kernels.cuda.launch.gpus import H200, HOPPER, Gpu, gpu_of
from weft.kernels.cuda.linear import prepare
from weft.kernels.cuda.linear.few import INPUTS, MOST_ROWS, OUTPUTS, Cut, are_few, few_rows, rows_compiled
from weft.kernels.cuda.linear.few import cut as usual_cut
from weft.kernels.cuda.linear.some import are_some, can_describe, some_rows
from weft.kernels.cuda.linear.stored import activated_stored, multiply_stored
from weft.kernels.cuda.linear.tiles import tiled
from weft.kernels.cuda.norm.exact import rows_of
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight

__all__ = ["activated_linear", "linear", "linear_into_stream", "prepare"]

Way = Literal["few", "tiles", "library"]
# Measured on an H200: rows from which the library is used. Kept from splitting sums, it can be ten times slower than
# our kernels with fewer, and with up to 56 rows for deep layers, which have few outputs and many inputs.
LIBRARY_ROWS, DEEP_ROWS, DEEP_INPUTS = 33, 64, 4096
# Outputs for which it is faster than our kernels even with fewer rows, and those rows.
SOME_OUTPUTS, SOME_ROWS = range(4096, 6144), 24
# Below these sizes, with lines that are not aligned, and on other GPUs, the library's bits were not compared with ours.
LEAST_OUTPUTS, LEAST_INPUTS = 2048, 512
# The library's settings: whether partial sums may be rounded, and whether sums may be split.
REDUCTIONS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}
# From this number of outputs a multiprocessor has several programs, without splitting sums.
ENOUGH_OUTPUTS = 6144
# Up to this number of outputs, sums are split into up to MOST_SHARES shares of at least LEAST_SHARE inputs, for about
# PROGRAMS programs: unsplit, a tensor core takes longer to add one after another than the memory to deliver. Layers
# that the library can multiply are left to it unless they are deep: with many rows it is faster, and knows no shares.
NARROW_OUTPUTS, MOST_SHARES, LEAST_SHARE, PROGRAMS = 3072, 4, 512, 128


def linear(x: Normed, weight: Weight) -> Float[Tensor, "n outputs"]:
    rows = rows_of(x)
    if rows.ndim != 2:
        found: Tensor = product(rows.reshape(-1, rows.shape[-1]), weight).unflatten(0, rows.shape[:-1])
        return found
    return product(rows, weight)


def linear_into_stream(x: Normed, weight: Weight) -> Addend:
    """Multiply for the residual stream, which adds up the shares of few rows in the same order as the other kernels."""
    x = rows_of(x)
    outputs, inputs, matrix, gpu = weight.outputs, weight.inputs, weight.matrix, gpu_of(x.device)
    if matrix is not None and weight.bias is None and shares_of(outputs, inputs) > 1 and are_few(x, matrix):
        by = cut(len(x), outputs, inputs, gpu)
        return few_rows(x, matrix, summed=False, by=by)
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    rows = rows_of(x)
    matrix, bias = weight.matrix, weight.bias
    if matrix is not None and activation in NAMES and are_few(rows, matrix):
        by = cut(len(rows), len(matrix), matrix.shape[1], gpu_of(rows.device))
        return few_rows(rows, matrix, bias, NAMES[activation], parts, by=by)
    if matrix is not None and activation in NAMES and are_some(rows, matrix):
        return some_rows(rows, matrix, bias, NAMES[activation], parts)
    if matrix is None:
        found = activated_stored(rows, weight, activation, parts, exact=True)
        if found is not None:
            return found
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
    if matrix is None:
        return multiply_stored(x, weight, exact=True)
    way = way_of(len(x), len(matrix), matrix.shape[1], gpu)
    if way == "few" and are_few(x, matrix):
        return few_rows(x, matrix, bias, by=cut(len(x), len(matrix), matrix.shape[1], gpu))
    if way == "library" and x.is_cuda and x.dtype in REDUCTIONS and can_describe(x, matrix):
        with unsplit(x.dtype):
            return F.linear(x, matrix, bias)
    return tiled(x, matrix, bias, shares=shares_of(len(matrix), matrix.shape[1]))


def shares_of(outputs: int, inputs: int) -> int:
    """Return the number of shares of every sum over the inputs. It knows nothing of rows.

    >>> shares_of(2048, 8192), shares_of(2048, 4096), shares_of(64, 2048), shares_of(64, 512), shares_of(4480, 15680)
    (4, 1, 4, 1, 1)
    """
    if outputs > NARROW_OUTPUTS or (outputs >= LEAST_OUTPUTS and inputs <= DEEP_INPUTS):
        return 1
    shares, blocks = 1, -(-outputs // OUTPUTS)
    while shares < MOST_SHARES and blocks * shares < PROGRAMS and inputs >= 2 * LEAST_SHARE * shares:
        shares *= 2
    return shares


def way_of(rows: int, outputs: int, inputs: int, gpu: Gpu = H200) -> Way:
    """Return which kernel multiplies; all give the same bits.

    >>> way_of(1, 2048, 8192), way_of(32, 4480, 15680), way_of(128, 2048, 8192), way_of(128, 6144, 2048)
    ('few', 'library', 'tiles', 'library')
    """
    if rows >= library_rows(outputs, inputs) and is_compared(outputs, inputs, gpu):
        return "library"
    return "few" if rows <= MOST_ROWS else "tiles"


def is_compared(outputs: int, inputs: int, gpu: Gpu) -> bool:
    """Return whether the library was seen to give our bits for such sizes."""
    aligned = outputs % 8 == 0 and inputs % 8 == 0 and shares_of(outputs, inputs) == 1
    return gpu.capability == HOPPER and aligned and outputs >= LEAST_OUTPUTS and inputs >= LEAST_INPUTS


def library_rows(outputs: int, inputs: int) -> int:
    """Return the number of rows from which the library is faster."""
    if outputs in SOME_OUTPUTS:
        return SOME_ROWS
    return DEEP_ROWS if outputs < SOME_OUTPUTS.start and inputs >= DEEP_INPUTS else LIBRARY_ROWS


def cut(rows: int, outputs: int, inputs: int, gpu: Gpu = H200) -> Cut:
    r"""Return a division into programs, the fastest measured for one row. Only its shares change a bit.

    Most programs that are fewer than multiprocessors read far ahead, into more than half of a multiprocessor's shared
    memory. Otherwise two could start on one and share its bandwidth, while the previous kernel still occupies others.

    >>> print(cut(1, 2048, 8192), cut(1, 2048, 4096), cut(1, 2880, 4096), cut(1, 22656, 4480), sep="\n")
    Cut(width=64, shares=4, inputs=128, warps=4, stages=4, lines=None, late=False)
    Cut(width=16, shares=1, inputs=512, warps=2, stages=4, lines=None, late=False)
    Cut(width=22, shares=1, inputs=128, warps=4, stages=8, lines=64, late=True)
    Cut(width=58, shares=1, inputs=64, warps=4, stages=6, lines=64, late=False)
    """
    shares, few = shares_of(outputs, inputs), rows_compiled(rows) == 16
    usual = usual_cut(rows, outputs, inputs, gpu)._replace(shares=shares)
    if not gpu.is_roomy:
        return usual
    if shares > 1:
        return Cut(16, shares, INPUTS, 2, 4) if few and outputs < LEAST_OUTPUTS else usual
    if few and outputs <= gpu.multiprocessors * 17:
        return Cut(16, 1, 1024, 4, 3) if inputs <= 2048 else Cut(16, 1, 512, 2, 4)
    # One, two or three programs run on a multiprocessor at the same time.
    if outputs < ENOUGH_OUTPUTS and outputs <= gpu.multiprocessors * OUTPUTS:
        return evenly(outputs, gpu.multiprocessors, INPUTS, 8)._replace(late=few)
    if few and outputs <= 2 * gpu.multiprocessors * OUTPUTS:
        return evenly(outputs, 2 * gpu.multiprocessors, INPUTS, 4)
    if few and outputs <= 3 * gpu.multiprocessors * OUTPUTS:
        return evenly(outputs, 3 * gpu.multiprocessors, INPUTS // 2, 6)
    return usual


def evenly(outputs: int, programs: int, inputs: int, stages: int) -> Cut:
    """Return a division into equal programs, in tiles of 64 lines, for which tensor cores have a faster instruction.

    An even width also serves two parts.
    """
    return Cut(max(16, -(-outputs // (2 * programs)) * 2), 1, inputs, 4, stages, OUTPUTS)


@contextmanager
def unsplit(dtype: torch.dtype) -> Iterator[None]:
    """Keep the library from splitting a sum. Only cuBLASLt has such a setting."""
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
