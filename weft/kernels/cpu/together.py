"""Independent work, run sequentially, and rows for outputs that lie side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from weft.kernels.interface import Batch, DecodeSteps
from weft.kernels.native.calls import room


def run_together(x: Tensor, one: Callable[[], object], *others: Callable[[], object]) -> None:
    for work in (one, *others):
        work()


def side_by_side(
    like: Float[Tensor, "rows any"], sizes: Sequence[int]
) -> tuple[Float[Tensor, "rows all"], tuple[Tensor, ...]]:
    rows = room((like.shape[0], sum(sizes)), like.dtype)
    return rows, rows.split_with_sizes(list(sizes), 1)


def record_decodes(compute: Callable[[Batch], Tensor]) -> DecodeSteps:
    """Compute every step anew: nothing is recorded here."""
    return DecodeSteps(compute)
