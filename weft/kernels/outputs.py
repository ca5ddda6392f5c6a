"""Placement of results: strided rows, and outputs written directly to their destination."""

from __future__ import annotations

from torch import Tensor


def placed(value: Tensor, out: Tensor | None) -> Tensor:
    """Return a value, copied to `out` if given: for operations that cannot write to `out` directly."""
    return value if out is None else out.copy_(value)


def rows_are_lines(x: Tensor) -> bool:
    """Return whether each row of a 2D or 3D tensor is contiguous; the rows themselves may be strided."""
    return x.stride(-1) == 1 and (x.ndim == 2 or (x.ndim == 3 and x.stride(1) == x.shape[2]))
