"""Where results go: rows that lie apart, and outputs that are written where they are to be."""

from __future__ import annotations

from torch import Tensor


def placed(value: Tensor, out: Tensor | None) -> Tensor:
    """Return a value, copied to `out` if that is given: for operations that cannot write there at once."""
    return value if out is None else out.copy_(value)


def rows_are_lines(x: Tensor) -> bool:
    """Return whether each row of two or three dimensions lies side by side, wherever the rows are."""
    return x.stride(-1) == 1 and (x.ndim == 2 or (x.ndim == 3 and x.stride(1) == x.shape[2]))
