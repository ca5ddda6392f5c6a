"""Start of a step of few tokens: embeddings, and the cosines and sines of the positions."""

from __future__ import annotations

from struct import Struct

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.formats.stored import Stored
from weft.kernels.native.calls import call, room
from weft.kernels.native.layouts import StoredPanels
from weft.kernels.native.library import DTYPES
from weft.kernels.native.packing import PANEL
from weft.kernels.native.stored import panel_bytes

LOOKUP, TURN, STORED_LOOKUP = Struct("3P3qf"), Struct("4P3qf"), Struct("3P7qf")


def look_up(tokens: Int[Tensor, " n"], table: Float[Tensor, "vocab size"], scale: float) -> Float[Tensor, "n size"]:
    assert tokens.dtype == torch.int32
    rows, size = tokens.shape[0], table.shape[1]
    y = room((rows, size), table.dtype)
    pointers = (tokens.data_ptr(), table.data_ptr(), y.data_ptr())
    call("weft_look_up", LOOKUP.pack(*pointers, rows, size, DTYPES[table.dtype], scale))
    return y


def look_up_stored(
    tokens: Int[Tensor, " n"], table: Stored, scale: float, dtype: torch.dtype
) -> Float[Tensor, "n size"]:
    """Return rows of a table in panels of a stored format."""
    layout, [panels] = table.format, table.tensors
    assert isinstance(layout, StoredPanels)
    assert tokens.dtype == torch.int32
    assert panels.shape == (-(-table.outputs // PANEL), panel_bytes(layout, table.inputs))
    assert panels.is_contiguous()
    rows, size = tokens.shape[0], table.inputs
    y = room((rows, size), dtype)
    pointers = (tokens.data_ptr(), panels.data_ptr(), y.data_ptr())
    own = (layout.kind, panels.shape[1], layout.columns, torch.get_num_threads())
    call("weft_look_up_stored", STORED_LOOKUP.pack(*pointers, rows, size, DTYPES[dtype], *own, scale))
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
