"""Embedding lookup."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cpu.linear import prepared_as_stored
from weft.kernels.formats.rounded import NOTHING, RoundedRows
from weft.kernels.formats.stored import Stored
from weft.kernels.native import embedding as kernels
from weft.kernels.native import library as native
from weft.kernels.native.layouts import StoredPanels
from weft.kernels.plain import embedding as plain
from weft.kernels.weight import Weight


def prepare_table(table: Stored, head: Weight | None = None) -> Stored:
    """Return a table of a format in panels, which are also the head's if the model is tied."""
    if head is not None and len(head.parts) == 1:
        part = head.parts[0]
        part = part.format.as_stored(part) if isinstance(part.format, RoundedRows) else part
        if isinstance(part.format, StoredPanels):
            return part
    return table if table.dense is not None else prepared_as_stored(table, NOTHING)


def look_up(
    tokens: Int[Tensor, " n"], table: Stored, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "n size"]:
    matrix = table.dense
    if isinstance(table.format, StoredPanels):
        own = dtype if dtype in native.DTYPES else torch.float32
        return kernels.look_up_stored(tokens.int(), table, scale, own).to(dtype)
    if matrix is None:
        return plain.look_up(tokens, table, scale, dtype)
    if native.suits(tokens) and matrix.dtype in native.DTYPES and matrix.is_contiguous():
        return kernels.look_up(tokens, matrix, scale)
    vectors = F.embedding(tokens, matrix)
    return vectors if scale == 1.0 else vectors * scale
