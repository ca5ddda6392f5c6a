"""Embedding lookup."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def look_up(
    tokens: Int[Tensor, " n"], table: Float[Tensor, "vocab size"], scale: float = 1.0
) -> Float[Tensor, "n size"]:
    return table[tokens] * scale
