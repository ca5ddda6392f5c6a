"""Embedding lookup."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.formats.stored import Stored
from weft.kernels.native import embedding as kernels
from weft.kernels.native import library as native
from weft.kernels.plain import embedding as plain


def look_up(
    tokens: Int[Tensor, " n"], table: Stored, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "n size"]:
    matrix = table.dense
    if matrix is None:
        return plain.look_up(tokens, table, scale, dtype)
    if native.suits(tokens) and matrix.dtype in native.DTYPES and matrix.is_contiguous():
        return kernels.look_up(tokens, matrix, scale)
    vectors = F.embedding(tokens, matrix)
    return vectors if scale == 1.0 else vectors * scale
