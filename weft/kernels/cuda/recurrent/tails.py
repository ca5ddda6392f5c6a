"""The grid walk of the recurrent kernels: where a row stands, which cells it covers, what its tail holds.

    [0, opening) is in the checkpoint   [opening, start) is in the tail   [start, end) is new

where `opening` is the start of the row's first cell, on the grid. `closing.py` reads and writes the states. Sizes may
be compile-time constants or not. Kernels inline these functions, and loads that they do not use are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Place(NamedTuple):
    """Where a row stands; scalars, or tensors for several rows."""

    start: tl.tensor  # position of its first new token
    end: tl.tensor  # position after its last one
    offset: tl.tensor  # of `start` within its cell
    first: tl.tensor  # its first new token in the pack
    slot: tl.tensor  # the state at the cell's start; there is none in a sequence's first cell
    tail: tl.tensor
    closing: tl.tensor  # slot for the state after a decode's token; negative if none is wanted


class Columns(NamedTuple):
    """Tokens of a cell that a row covers, as columns of a tile."""

    position: tl.tensor
    ring: tl.tensor  # their places in the tail
    token: tl.tensor  # in the pack
    is_tail: tl.tensor
    is_new: tl.tensor


@triton.jit
def place_of(row, row_start, row_first, row_slot, row_tail, row_closing, CELL, real=None):
    """Return where a row stands; of several, only those that are `real`."""
    start, first = tl.load(row_start + row, real), tl.load(row_first + row, real)
    return Place(
        start=start, end=start + tl.load(row_first + row + 1, real) - first, offset=start % CELL, first=first,
        slot=tl.load(row_slot + row, real).to(tl.int64), tail=tl.load(row_tail + row, real).to(tl.int64),
        closing=tl.load(row_closing + row, real).to(tl.int64),
    )  # fmt: skip


@triton.jit
def open_cell(start, offset, column, CELL: tl.constexpr, RING: tl.constexpr):
    """Return which columns of the cell are in the tail, before the token at `start`, and their places in its ring.

    If the ring is as long as a cell, its index 0 is the start of the cell: the places are consecutive, and load
    together.
    """
    return column < offset, column if RING == CELL else around((start - offset) % RING, column, RING)


@triton.jit
def around(first, number, RING: tl.constexpr):
    """Return the places in a ring that are `number` after `first`, at most once around. A remainder costs more."""
    there = first + number
    return tl.where(there < RING, there, there - RING)


@triton.jit
def columns_of(at, position, column, CELL: tl.constexpr, RING: tl.constexpr):
    """Return the columns of the cell at `position`. Those from CELL on pad a tile."""
    here = position + column
    is_new = (here >= at.start) & (here < at.end)
    if column.shape[0] != CELL:
        is_new = is_new & (column < CELL)
    return Columns(
        position=here, ring=here % RING, token=(at.first + here - at.start).to(tl.int64),
        is_tail=here < at.start, is_new=is_new,
    )  # fmt: skip


@triton.jit
def kept_from(at, CELL: tl.constexpr, RING: tl.constexpr):
    """Return the position from which on the row's tokens are kept in its tail.

    A later row may start up to RING - CELL tokens before this one's end, and reads its cell from the start.
    """
    earliest = tl.maximum(at.end - (RING - CELL), 0)
    return tl.maximum(at.start, earliest - earliest % CELL)


@triton.jit
def is_short(at, ROOM: tl.constexpr, NEW: tl.constexpr):
    """Return whether a row has at most NEW tokens and, with those before it in its cell, ROOM; never if NEW is 0."""
    return (at.end - at.start <= NEW) & (at.offset + at.end - at.start <= ROOM)


@triton.jit
def whole_cells(at, begin, stop, CELL: tl.constexpr):
    """Return the bounds of the pieces, of [begin, stop), that are whole cells of new tokens.

    [begin, whole) starts inside a cell   [whole, rest) are whole cells   [rest, stop) ends inside one
    """
    whole = tl.where((at.offset > 0) | (at.end < at.start + CELL), begin + 1, begin)
    return whole, tl.maximum(tl.where(at.end % CELL > 0, stop - 1, stop), whole)


@triton.jit
def decay_before(decays, at, real, RING: tl.constexpr, SIZE: tl.constexpr = 1):
    """Load the log decay from the start of a row's first cell up to the row, of SIZE that lie together."""
    return tl.load(decays + (at.start - 1) % RING * SIZE, real & (at.offset > 0), 0.0)


@triton.jit
def keep_token(source, target, here, HEADS: tl.constexpr, SIZE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a token's numbers, SIZE of each head, to place `here` of a tail."""
    for done in range(0, HEADS * SIZE, BLOCK):
        number = done + tl.arange(0, BLOCK)
        real = number < HEADS * SIZE
        inside = number // SIZE * (RING * SIZE) + here * SIZE + number % SIZE
        tl.store(target + inside, tl.load(source + number, mask=real), mask=real)
