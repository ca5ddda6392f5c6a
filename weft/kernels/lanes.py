"""The rows of a step as compiled kernels walk over them: few small int32 tensors of predictable shape.

A reference on the CPU wants its indices spelled out (`batch.Group`, `batch.Convolution`); a compiled kernel computes
them from where a row starts, so that a recorded graph can replay a step of other rows with the same pointers. Where
`Batch.lanes` is given, `decodes`, `groups` and `convolution` are not.

Rows longer than one token are cut at the grid into *pieces*: tokens of one row in one cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.base.grid import CELL

# Where no state is to be written.
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class PageList:
    """Where keys and values go and where they are read, for full or for windowed attention.

    Row r reads `pages[bounds[r] : bounds[r + 1]]`, consecutive cells from position `first_position[r]` on. A token at
    position p lies at index p % cell of its page.
    """

    write_page: Tensor  # [tokens]
    first_position: Tensor  # [rows] a multiple of the cell; 0 for full attention
    bounds: Tensor  # [rows + 1]
    pages: Tensor  # [all]
    # The same on the host, for libraries that plan there.
    host_bounds: Tensor  # [rows + 1]
    host_first_position: Tensor  # [rows]


@dataclass(frozen=True, slots=True)
class Lanes:
    """int32 tensors. The leading `decodes` rows are one token each; the others are cut into pieces, in order."""

    rows: int
    decodes: int
    pieces: int
    most_pieces: int  # of one row
    longest: int  # tokens of the longest row
    farthest: int  # the greatest end of any row
    start: Tensor  # [rows] position of the first new token
    first: Tensor  # [rows + 1] packed index of the first new token of every row, and the number of all
    slot: Tensor  # [rows] checkpoint at the start of the row's cell; to be looked at only if start >= cell
    tail: Tensor  # [rows]
    closing: Tensor  # [rows] of a decode whose token closes its cell: the slot for the state there, or NO_SLOT
    piece_row: Tensor  # [pieces]
    piece_position: Tensor  # [pieces] where the piece's cell starts, a multiple of the cell
    piece_slot: Tensor  # [pieces] slot for the state at the end of the piece's cell, or NO_SLOT
    first_piece: Tensor  # [rows - decodes + 1] of row decodes + i: its first piece
    full: PageList | None
    windowed: PageList | None
    # On the host.
    host_start: Tensor  # [rows]
    host_first: Tensor  # [rows + 1]
    cell: int = CELL
    # Every row is one token, on the CPU, for its kernels in C++.
    native: bool = False


def built_on_gpu() -> bool:
    """Return whether parameters are being made on a GPU, so that its kernels will use the model's memory."""
    return torch.get_default_device().type == "cuda"
