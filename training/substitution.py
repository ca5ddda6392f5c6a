"""The inverse of many small unit lower triangular matrices on a GPU, a program for each, row by row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def invert(a: Tensor) -> Tensor:
    """(1 + A)^-1 of [matrices, size, size], where only what is below the diagonal is read."""
    matrices, size, _ = a.shape
    assert a.is_contiguous()
    inverse = torch.empty_like(a)
    invert_kernel[(matrices,)](a, inverse, SIZE=size, num_warps=4)
    return inverse


@triton.jit
def invert_kernel(a, inverse, SIZE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = tl.arange(0, SIZE)
    found = tl.where(row == column, 1.0, 0.0)
    for i in range(1, SIZE):
        # Row i of the inverse: minus what is left of the diagonal in row i of A, times the rows above.
        weights = tl.load(a + first + i * SIZE + at, mask=at < i, other=0.0).to(tl.float32)
        new = -tl.sum(weights[:, None] * found, 0)
        found = tl.where((row == i) & (column < i), new[None, :], found)
    tl.store(inverse + first + row * SIZE + column, found.to(inverse.dtype.element_ty))
