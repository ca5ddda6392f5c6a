"""Outcomes that lie side by side, so that one product can read them all: each is written where it is to be."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from weft.kernels.native.calls import room


def side_by_side(
    like: Float[Tensor, "rows any"], sizes: Sequence[int]
) -> tuple[Float[Tensor, "rows all"], tuple[Tensor, ...]]:
    """New rows of so many columns in all, and the columns of each. Their dtype and device are those of `like`."""
    rows = room((like.shape[0], sum(sizes)), like.dtype, like.device)
    return rows, rows.split_with_sizes(list(sizes), 1)


def placed(value: Tensor, out: Tensor | None) -> Tensor:
    """For whoever cannot write there at once."""
    return value if out is None else out.copy_(value)
