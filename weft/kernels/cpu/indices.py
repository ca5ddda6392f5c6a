"""Explicit indices of a step, for PyTorch operations: derived once per step and shared by all layers.

Recurrent layers treat the leading rows of one token (`Decodes`) and the other rows (`Group`) separately. The pieces
of a group's rows come in ranks: rank 0 holds the first piece of every row, rank 1 the second of the rows that have
one, ... Rows are ordered by their number of pieces, longest first, so the rows of rank c are the first rows of rank
c - 1 and a state tensor is advanced by slicing. Tensors are int64 unless noted.

Plain integers that let kernels take views instead of copies are here too: they are the plan's own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class OpenCell(NamedTuple):
    """The cell in which a row starts, on the host."""

    tail: int
    slot: int | None  # checkpoint at the cell's start; None in the first cell of a sequence
    low: int  # ring index of the cell's first token
    offset: int  # of the row's first new token within the cell


class CaptureAt(NamedTuple):
    """A state to write at the end of a piece: the piece's row (an index within its rank) and the slot."""

    row: int
    slot: int


@dataclass(frozen=True, slots=True)
class Decodes:
    """The leading rows of one token each, tokens 0 .. rows of the pack."""

    rows: int
    reach: int  # the largest number of tokens in an open cell, including the new one
    cells: tuple[OpenCell, ...]
    captures: tuple[CaptureAt, ...]
    any_opens: bool  # some new token is the first of its cell
    # If there are several rows:
    tail: Tensor | None  # [rows]
    ring: Tensor | None  # [rows] ring index of the new token
    previous: Tensor | None  # [rows] ring index of the token before it
    opens: Tensor | None  # [rows] bool: the new token is the first of its cell
    # And if not all cells start at ring index 0:
    keys: Tensor | None  # [rows, reach] ring indices of the columns of the cell


@dataclass(frozen=True, slots=True)
class Rank:
    """The c-th pieces of a group's rows, on columns 0 .. reach of their cells.

    A row's new tokens lie on columns offset .. end_offset; earlier columns are its tail, later ones repeat its last
    token. Results on those later columns are never used: a row that has them neither continues nor is captured.
    """

    rows: int
    first: int  # the smallest offset of any piece: outputs are computed on columns first .. reach
    reach: int  # the largest end offset of any piece
    continuing: int  # number of these rows (the first ones) that continue into another cell
    captures: tuple[CaptureAt, ...]
    has_tail: bool  # some row starts inside this cell
    stays: bool  # some of the tokens stay in a tail
    # A rank of one row is a contiguous range of the pack and needs no index tensors.
    span: tuple[int, int] | None
    token: Tensor | None  # [rows * reach] packed index on every column
    # Which of the [rows * (reach - first)] outputs are real, and their packed tokens.
    real: Tensor | None  # [new tokens]
    real_token: Tensor | None  # [new tokens]


@dataclass(frozen=True, slots=True)
class TailWrites:
    """Tokens stored in their row's tail: those of the open cell, plus room for rollbacks."""

    token: Tensor  # [writes] packed index
    tail: Tensor  # [writes]
    ring: Tensor  # [writes] index in a ring that is at least as long as a cell and its room


@dataclass(frozen=True, slots=True)
class Group:
    """Some rows of several tokens, few enough that a rank's intermediate values fit in caches."""

    rows: int
    cells: tuple[OpenCell, ...]  # where each row starts
    ranks: tuple[Rank, ...]
    writes: TailWrites
    # For rank 0, if it has a tail and more than one row.
    tail: Tensor | None  # [rows]
    ring: Tensor | None  # [rows, reach] ring index of every column of the open cell
    previous: Tensor | None  # [rows] ring index of the token before the first new one
    opens: Tensor | None  # [rows] bool: the first new token is the first of its cell
    is_tail: Tensor | None  # [rows, reach] bool: columns before the first new token


@dataclass(frozen=True, slots=True)
class Convolution:
    """Indices of causal convolutions: the locations of the earlier inputs that a row's first tokens need.

    The first `head` tokens of a row (all of a short one) are computed on [rows, width - 1 + head]: the earlier
    inputs, then the new ones. Every later token needs only new tokens of its own row, side by side in the pack.
    """

    width: int
    head: int
    # Earlier inputs come from the tail or the checkpoint before the row's cell, or are zeros before position 0.
    tail: Tensor  # [rows, 1]
    tail_ring: Tensor  # [rows, width - 1] index in a ring of width - 1 + room
    all_tail: bool
    # Unless `all_tail`:
    from_tail: Tensor | None  # [rows, width - 1] bool
    from_state: Tensor | None  # [rows, width - 1] bool
    any_state: bool
    read_slot: Tensor | None  # [rows, 1]
    state_index: Tensor | None  # [rows, width - 1] index in the checkpoint's window
    single: bool  # every row is one token
    lone: tuple[int, int] | None  # for a single row of one token: its tail, and the ring index of its input there
    body: tuple[int, int] | None  # range of packed tokens that holds those after a row's head
    # Unless `single`:
    first_token: Tensor | None  # [rows, head] packed index of a row's first tokens; a shorter row repeats its last
    real: Tensor | None  # [heads] which of the rows * head outputs are real
    real_token: Tensor | None  # [heads] and the packed tokens that they belong to
    keep_token: Tensor | None  # [kept] inputs to keep in the tail
    # Destination of all inputs that are kept.
    keep_tail: Tensor  # [kept]
    keep_ring: Tensor  # [kept]
    # Windows to write: the width - 1 inputs before each captured position, new or earlier inputs of the row.
    captures: int
    capture_slot: Tensor | None  # [captures]
    capture_token: Tensor | None  # [captures, width - 1] packed index
    capture_history: Tensor | None  # [captures, width - 1] index in the rows * (width - 1) earlier inputs
    capture_is_new: Tensor | None  # [captures, width - 1] bool


@dataclass(frozen=True, slots=True)
class Paging:
    """Where keys and values are written and read, for full or windowed attention."""

    write_page: Tensor  # [tokens]
    write_offset: Tensor  # [tokens] within the page
    table: Tensor  # [rows, cells]
    first_position: Tensor  # [rows] position of the table's first column; 0 for full attention
    lone: tuple[int, int] | None = None  # for a single token: its page, and its index there


@dataclass(frozen=True, slots=True)
class Indices:
    """Values that this package's operations derive from a step."""

    full: Paging | None
    windowed: Paging | None
    # For recurrent layers; None and empty if the model has none.
    decodes: Decodes | None
    groups: tuple[Group, ...]
    convolution: Convolution | None

    def paging(self, window: int | None) -> Paging:
        found = self.full if window is None else self.windowed
        assert found is not None
        return found
