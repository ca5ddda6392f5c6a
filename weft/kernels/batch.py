"""A plan as kernels see it: index tensors, computed once per step on the host and shared by all layers.

Rows are cut at the grid into *pieces*: tokens of one row in one cell. Pieces come in groups of equal treatment (rows of
one token, and the others), padded to the group's longest piece, and inside a group in ranks: rank 0 holds the first
piece of every row, rank 1 the second of the rows that have one, ... Rows are ordered by their number of pieces,
longest first, so the rows of rank c are the first rows of rank c - 1 and a state tensor is advanced by slicing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rank:
    """The c-th pieces of a group's rows: pieces[low:high], belonging to the group's rows 0 .. high - low."""

    low: int
    high: int
    # How many of these rows (the first ones) go on into a further cell.
    continuing: int
    # States to hand out at the end of these pieces: rows relative to the rank, and the slots they go to.
    capture_row: Tensor  # [captures]
    capture_slot: Tensor  # [captures]


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of equal treatment, padded to `length` tokens each; offsets are positions within the cell."""

    rows: int
    length: int
    reach: int  # the largest end offset of any piece: keys 0 .. reach of a cell cover all of them
    token: Tensor  # [pieces, length] packed index of each token; padding points at token 0 of the pack
    valid: Tensor  # [pieces, length] bool
    offset: Tensor  # [pieces] offset of the piece's first token; not 0 only in rank 0
    end_offset: Tensor  # [pieces] one past its last
    # A piece's place among the keys of its cell: key j is new token j - offset if offset <= j < end_offset, else tail.
    key_token: Tensor  # [pieces, reach] packed index of new keys, 0 elsewhere
    key_is_new: Tensor  # [pieces, reach] bool
    key_is_tail: Tensor  # [pieces of rank 0, reach] bool: j < offset
    has_tail: bool  # any row starts inside a cell
    # The rows of rank 0, in order.
    tail: Tensor  # [rows] tail index
    ring: Tensor  # [rows, reach] index in a tail ring of `cell` + room tokens of the open cell's offset j
    read_slot: Tensor  # [rows] checkpoint before the row's first cell
    has_state: Tensor  # [rows] bool: the row's first cell is not the sequence's first
    any_state: bool
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class TailWrites:
    """Which tokens leave something in their row's tail: those of the open cell, plus room for rollbacks."""

    token: Tensor  # [writes] packed index
    tail: Tensor  # [writes]
    ring: Tensor  # [writes] index in a ring of `cell` + room tokens


@dataclass(frozen=True, slots=True)
class Convolution:
    """Indices of the padded line on which causal convolutions run.

    Every row is laid out as its width - 1 earlier inputs followed by its new ones, row after row:
    [h h h x x x x x | h h h x | ...]
    """

    width: int
    length: int  # of the line
    token_at: Tensor  # [tokens] where the packed tokens lie on the line
    history_at: Tensor  # [rows, width - 1] where the earlier inputs lie
    # Where the earlier inputs come from: the tail, or the checkpoint before the row's cell, or zeros before position 0.
    from_tail: Tensor  # [rows, width - 1] bool
    from_state: Tensor  # [rows, width - 1] bool
    any_tail: bool
    any_state: bool
    all_tail: bool
    tail: Tensor  # [rows]
    tail_ring: Tensor  # [rows, width - 1] index in a ring of width - 1 + room
    read_slot: Tensor  # [rows]
    state_index: Tensor  # [rows, width - 1] index in the checkpoint's window
    # Windows to hand out: the width - 1 inputs before each captured position.
    capture_at: Tensor  # [captures, width - 1] on the line
    capture_slot: Tensor  # [captures]
    # Inputs to keep in the tail.
    keep_at: Tensor  # [kept] on the line
    keep_tail: Tensor  # [kept]
    keep_ring: Tensor  # [kept]
    single: bool  # every row is one token: the line is [rows, width]


@dataclass(frozen=True, slots=True)
class Paging:
    """Where keys and values go and where they are read, for full or for windowed attention."""

    write_page: Tensor  # [tokens]
    write_offset: Tensor  # [tokens] within the page
    table: Tensor  # [rows, cells]
    first_position: Tensor  # [rows] position of the table's first column; 0 for full attention


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that layers need to know of a step. Tensors are int64 unless said otherwise."""

    tokens: int
    rows: int
    decode_rows: int  # the leading rows of one token each
    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    start: Tensor  # [rows]
    end: Tensor  # [rows]
    # The same on the host, for references that walk over rows.
    host_start: tuple[int, ...]
    host_end: tuple[int, ...]
    host_first: tuple[int, ...]  # packed index of each row's first token
    full: Paging | None
    windowed: Paging | None
    groups: tuple[Group, ...]  # empty if the model has no recurrent layers
    tail_writes: TailWrites | None
    convolution: Convolution | None
