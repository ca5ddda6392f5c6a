"""Embedding lookup, by PyTorch's kernel."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def look_up(
    tokens: Int[Tensor, " n"], table: Float[Tensor, "vocab size"], scale: float = 1.0
) -> Float[Tensor, "n size"]:
    vectors = F.embedding(tokens, table)
    return vectors if scale == 1.0 else vectors * scale
