"""Embedding lookup."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.formats.stored import Stored
from weft.kernels.weight import Weight


def prepare_table(table: Stored, head: Weight | None = None) -> Stored:
    return table


def look_up(
    tokens: Int[Tensor, " n"], table: Stored, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "n size"]:
    found = table.format.rows(table, tokens)
    vectors = found.tensors[0] if found.dense is not None else found.decode().to(dtype)
    return vectors * scale
