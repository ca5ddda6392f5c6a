"""Plan of a step's page reads and masks: made once, used by all layers with the same window.

Rows of several tokens are read in blocks of queries, so that masks stay bounded; each block reads only what it can
see. Rows of one token are read in one padded pass where they are short, one by one where they are long; a common
prefix is read once for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.indices import Paging
from weft.kernels.rows import RowPositions

# Queries of one row scored at once: bounds a mask to this times the keys that they can see.
QUERY_BLOCK = 512
# Rows of one token that see at most this number of tokens are read in one padded pass.
PADDED_TOKENS = 512
# Pages that a common prefix must save to be worth its own pass.
SHARING_PAGES = 8


@dataclass(frozen=True, slots=True)
class RowRead:
    """Queries of one row, and the keys that they see together: those of `pages`, cut to [low, high)."""

    tokens: slice  # of the pack
    pages: Tensor  # [pages]
    low: int
    high: int
    causal: bool  # query i sees keys 0 .. i, and no mask is needed
    mask: Tensor | None  # [queries, keys] bool; None: every query sees every key


@dataclass(frozen=True, slots=True)
class PaddedRead:
    """Rows of one query each, padded to the same number of pages."""

    tokens: slice | Tensor
    pages: Tensor  # [rows * pages]
    unseen: Tensor  # [unseen] indices into the rows * keys that are read: padding, and keys outside the window
    mask: Tensor  # [rows, 1, 1, keys] bool


@dataclass(frozen=True, slots=True)
class SharedRead:
    """Rows of one query each whose sequences start with the same pages; `own` reads the rest, in the same order."""

    tokens: slice | Tensor
    pages: Tensor  # [pages]
    own: tuple[RowRead | PaddedRead, ...]


Read = RowRead | PaddedRead | SharedRead


class Spans(NamedTuple):
    """Rows of a step as plain integers."""

    decodes: int
    start: list[int]
    end: list[int]
    first: list[int]


def plan_reads(rows: RowPositions, paging: Paging, window: int | None, cell: int) -> list[Read]:
    spans = Spans(rows.decodes, rows.start.tolist(), rows.end.tolist(), rows.first.tolist())
    reads: list[Read] = []
    for members, shared in by_beginning(spans, paging, window, cell):
        own = _single_reads(spans, paging, members, shared * cell, window, cell)
        if shared:
            reads.append(SharedRead(_tokens(members), paging.table[members[0], :shared], own))
        else:
            reads.extend(own)
    for row in range(spans.decodes, len(spans.start)):
        start, end = spans.start[row], spans.end[row]
        for low in range(start, end, QUERY_BLOCK):
            reads.append(row_read(spans, paging, row, low, min(low + QUERY_BLOCK, end), 0, window, cell))
    return reads


def by_beginning(spans: Spans, paging: Paging, window: int | None, cell: int) -> list[tuple[list[int], int]]:
    """Group the rows of one token by their first page, with the number of pages that each group shares."""
    rows = list(range(spans.decodes))
    if window is not None or len(rows) < 2:
        return [(rows, 0)] if rows else []
    table = paging.table.numpy()
    sets: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        sets[int(table[row, 0])].append(row)
    found, alone = [], []
    for members in sets.values():
        # The open cell is still being written, so it is never shared.
        closed = min(spans.start[row] for row in members) // cell
        same = (table[members, :closed] == table[members[0], :closed]).all(0)
        shared = closed if same.all() else int(same.argmin())
        if shared * (len(members) - 1) >= SHARING_PAGES:
            found.append((members, shared))
        else:
            alone += members
    return [*found, (sorted(alone), 0)] if alone else found


def _tokens(rows: Sequence[int]) -> slice | Tensor:
    """Return the tokens of rows of one token: they lead the pack, so a row's index is its token's."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)


def first_visible(position: int, floor: int, window: int | None) -> int:
    """Return the first position from `floor` on that a query at `position` sees."""
    return floor if window is None else max(floor, position - window + 1)


def _single_reads(
    spans: Spans, paging: Paging, rows: Sequence[int], floor: int, window: int | None, cell: int
) -> tuple[RowRead | PaddedRead, ...]:
    """Return the reads of rows of one token, from position `floor` on."""
    longest = max(spans.end[row] - first_visible(spans.start[row], floor, window) for row in rows)
    if len(rows) > 1 and longest <= PADDED_TOKENS:
        return (padded_read(spans, paging, rows, floor, window, cell),)
    return tuple(row_read(spans, paging, row, spans.start[row], spans.end[row], floor, window, cell) for row in rows)


def row_read(
    spans: Spans, paging: Paging, row: int, start: int, end: int, floor: int, window: int | None, cell: int
) -> RowRead:
    """Return the read of queries at positions [start, end) of a row, which see positions from `floor` on."""
    lowest = first_visible(start, floor, window)
    base = lowest // cell * cell
    cells = torch.arange(lowest // cell, (end - 1) // cell + 1)
    pages = paging.table[row].index_select(0, cells - paging.first_position[row] // cell)
    first = spans.first[row] + start - spans.start[row]
    alone = end - start == 1
    causal = not alone and start == 0 and (window is None or window >= end)
    mask = None
    if not alone and not causal:
        query = torch.arange(start, end).unsqueeze(1)
        key = torch.arange(lowest, end)
        mask = key <= query
        if window is not None:
            mask &= key > query - window
    return RowRead(slice(first, first + end - start), pages, lowest - base, end - base, causal, mask)


def padded_read(
    spans: Spans, paging: Paging, rows: Sequence[int], floor: int, window: int | None, cell: int
) -> PaddedRead:
    ends = [spans.end[row] for row in rows]
    lows = [first_visible(end - 1, floor, window) for end in ends]
    width = max((end - 1) // cell - low // cell + 1 for low, end in zip(lows, ends))
    index = torch.tensor(list(rows))
    low, end = (torch.tensor(values).unsqueeze(1) for values in (lows, ends))
    first_cell = low // cell
    columns = first_cell - paging.first_position[index].unsqueeze(1) // cell + torch.arange(width)
    # Columns beyond a row's last cell are masked; their pages only have to exist.
    pages = paging.table[index].gather(1, columns.clamp(max=paging.table.shape[1] - 1))
    key = first_cell * cell + torch.arange(width * cell)
    seen = (key >= low) & (key < end)
    unseen = torch.from_numpy(np.flatnonzero(~seen.numpy()))
    return PaddedRead(_tokens(rows), pages.flatten(), unseen, seen[:, None, None, :])
