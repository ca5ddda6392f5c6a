"""Embedding lookup."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.native import embedding as kernels
from weft.kernels.native import library as native


def look_up(
    tokens: Int[Tensor, " n"], table: Float[Tensor, "vocab size"], scale: float = 1.0
) -> Float[Tensor, "n size"]:
    if native.suits(tokens) and table.dtype in native.DTYPES and table.is_contiguous():
        return kernels.look_up(tokens, table, scale)
    vectors = F.embedding(tokens, table)
    return vectors if scale == 1.0 else vectors * scale
