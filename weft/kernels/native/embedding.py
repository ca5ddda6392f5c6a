"""Start of a step of few tokens: embeddings, and the cosines and sines of the positions."""

from __future__ import annotations

from struct import Struct

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.native.calls import call, room
from weft.kernels.native.library import DTYPES

LOOKUP, TURN = Struct("3P3qf"), Struct("4P3qf")


def look_up(tokens: Int[Tensor, " n"], table: Float[Tensor, "vocab size"], scale: float) -> Float[Tensor, "n size"]:
    assert tokens.dtype == torch.int32
    rows, size = tokens.shape[0], table.shape[1]
    y = room((rows, size), table.dtype)
    pointers = (tokens.data_ptr(), table.data_ptr(), y.data_ptr())
    call("weft_look_up", LOOKUP.pack(*pointers, rows, size, DTYPES[table.dtype], scale))
    return y


def turn(
    positions: Int[Tensor, " n"], frequency: Float[Tensor, " half"], scale: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "n 1 size"], Float[Tensor, "n 1 size"]]:
    """Return cosines and signed sines."""
    assert positions.dtype == torch.int32
    rows, half = positions.shape[0], frequency.shape[0]
    cosine, sine = room((rows, 1, 2 * half), dtype), room((rows, 1, 2 * half), dtype)
    pointers = (positions.data_ptr(), frequency.data_ptr(), cosine.data_ptr(), sine.data_ptr())
    call("weft_turn", TURN.pack(*pointers, rows, half, DTYPES[dtype], scale))
    return cosine, sine
