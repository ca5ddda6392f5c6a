"""Embedding lookup, by PyTorch's kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.formats.stored import Stored
from weft.kernels.plain import embedding as plain
from weft.kernels.weight import Weight


def prepare_table(table: Stored, head: Weight | None = None) -> Stored:
    return table


def look_up(
    tokens: Int[Tensor, " n"], table: Stored, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "n size"]:
    if table.dense is None:
        return plain.look_up(tokens, table, scale, dtype)
    vectors = F.embedding(tokens, table.dense)
    return vectors if scale == 1.0 else vectors * scale
