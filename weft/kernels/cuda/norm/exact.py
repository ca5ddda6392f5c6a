"""Norms of the exact package: a stream that always computes them with their own kernel.

A norm inside the next matmul (`stream.LazyNorm`) exists for one row only, and adds in another order.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.norm.norms import add, gated_rms_norm, join, rms_norm
from weft.kernels.stream import Change, Normed, Residual

__all__ = ["gated_rms_norm", "residual", "rms_norm", "rows_of"]


def residual(x: Float[Tensor, "tokens hidden"]) -> Residual:
    return Residual(x, join_in_order, add_in_order)


def join_in_order(
    x: Float[Tensor, "n size"], changes: list[Change], weight: Float[Tensor, " size"], eps: float
) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]:
    """Join. The kernel takes two changes and adds their parts in order."""
    for change in changes[:-2]:
        x = add_in_order(x, change)
    return join(x, changes[-2:], weight, eps)


def add_in_order(x: Float[Tensor, "n size"], change: Change) -> Float[Tensor, "n size"]:
    if change.value.ndim == 3:
        total, *others = change.value
        for part in others:
            total = total + part
        change = replace(change, value=total.to(x.dtype))
    return add(x, change)


def rows_of(x: Normed) -> Float[Tensor, "n size"]:
    assert isinstance(x, Tensor), "exact streams compute their norms"
    return x
