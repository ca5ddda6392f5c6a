"""The inverse of many small unit lower triangular matrices on a GPU, a program for each, as serving computes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from weft.kernels.cuda.gated_delta.cells import invert


@torch.library.custom_op("weft_training::inverse", mutates_args=())
def inverse(a: Tensor) -> Tensor:
    """As an operator, which a compiler need not look into."""
    return launch(a)


@inverse.register_fake
def _shape(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def launch(a: Tensor) -> Tensor:
    """(1 + A)^-1 of [matrices, size, size], where only what is below the diagonal is read."""
    matrices, size, _ = a.shape
    assert a.is_contiguous()
    found = torch.empty_like(a)
    invert_kernel[(matrices,)](a, found, SIZE=size, num_warps=4)
    return found


@triton.jit
def invert_kernel(a, found, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = tl.program_id(0).to(tl.int64) * SIZE * SIZE + row * SIZE + column
    below = tl.load(a + at, mask=row > column, other=0.0).to(tl.float32)
    tl.store(found + at, invert(below, SIZE, tl.float16, "tf32").to(found.dtype.element_ty))
