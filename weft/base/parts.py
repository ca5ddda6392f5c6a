"""Parts of a plan that are computed by themselves: some rows, the cells of a row, drafts as rows of one token each.

They are for the layers of a model. What is sampled stays with the whole plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from weft.base.grid import first_window_cell, floor_to_grid
from weft.base.plan import NO_DRAFTS, Captures, Ints, Longs, Places, Plan, cut_rows


def some_rows(plan: Plan, rows: Places, places: Places) -> Plan:
    """Return a plan of some rows, whose tokens are at these places."""
    chosen = np.arange(plan.rows, dtype=np.int32)[rows]
    captures, drafts = plan.captures, plan.drafts
    if len(captures.row):
        number = np.full(plan.rows, -1, np.int32)
        number[chosen] = np.arange(len(chosen), dtype=np.int32)
        ours = number[captures.row] >= 0
        captures = Captures(number[captures.row[ours]], captures.position[ours], captures.slot[ours])
    if drafts is not NO_DRAFTS:
        drafts = replace(drafts, **cut_rows(drafts, rows))
    return replace(plan, tokens=plan.tokens[places], captures=captures, drafts=drafts, **cut_rows(plan, rows))


def rows_of_one(plan: Plan, cell: int) -> Plan | None:
    """Return a plan with drafts as one of decodes: each token is a row, and those of a sequence lie side by side.

    A row reads what the rows before it of the same sequence write, so it needs kernels that compute them in order.
    None: the plan has no drafts, or longer rows besides.
    """
    # A row has at least one token besides its drafts.
    if not len(plan.drafts.counts) or len(plan.tokens) != plan.rows + int(plan.drafts.counts.sum()):
        return None
    count = plan.drafts.counts + 1
    row, first = np.repeat(np.arange(plan.rows), count), np.cumsum(count) - count
    position = np.arange(len(row)) + (plan.start - first)[row]
    captures = plan.captures
    if len(captures.row):
        writing = (first[captures.row] + captures.position - 1 - plan.start[captures.row]).astype(np.int32)
        captures = replace(captures, row=writing)
    arrays, start = cut_rows(plan, row), position.astype(np.int32)
    arrays["from_board"] = np.zeros(len(row), np.int32)
    arrays["from_board"][first] = plan.from_board
    arrays |= {"start": start, "end": start + 1, "read_slot": _slots_before(plan, position, row, cell)}
    return replace(plan, captures=captures, drafts=NO_DRAFTS, **arrays)


def _slots_before(plan: Plan, position: Longs, row: Longs, cell: int) -> Ints:
    """Return the checkpoint before each token: the row's own, or from the next grid position on the one written there.

    A sequence that may be settled anywhere writes a checkpoint at every grid position of its row.
    """
    slots: Ints = plan.read_slot[row]
    captures = plan.captures
    for of_row, at, slot in zip(captures.row.tolist(), captures.position.tolist(), captures.slot.tolist(), strict=True):
        slots[(row == of_row) & (position // cell * cell == at)] = slot
    return slots


def cells_of(plan: Plan, row: int, cell: int, window: int | None, scratch: tuple[int, int]) -> Iterator[Plan]:
    """Yield a plan for each cell of a row of several tokens.

    Between two cells, a state that the plan does not keep goes to one of two `scratch` slots.
    """
    ours = plan.captures.row == row
    slots = dict(zip(plan.captures.position[ours].tolist(), plan.captures.slot[ours].tolist(), strict=True))
    start, end = int(plan.start[row]), int(plan.end[row])
    packed = int((plan.end - plan.start)[:row].sum())
    lone = some_rows(plan, slice(row, row + 1), slice(packed, packed + end - start))
    slot, here = int(plan.read_slot[row]), start
    while here < end:
        there = min(end, floor_to_grid(here, cell) + cell)
        written = slots.get(there)
        if written is None and there < end:
            # Never the slot that this pass reads.
            written = scratch[there // cell % 2]
        captures = [] if written is None else [(0, there, written)]
        first = int(lone.window_first[0]) if window is None else first_window_cell(here, window, cell)
        yield replace(
            lone,
            start=_one(here),
            end=_one(there),
            tokens=lone.tokens[here - start : there - start],
            from_board=lone.from_board if here == start else _one(0),
            read_slot=_one(slot),
            captures=Captures(*np.array(captures, np.int32).reshape(-1, 3).T),
            # The window pages that this cell sees, and no earlier ones.
            window_first=_one(first),
            window_table=lone.window_table[:, first - int(lone.window_first[0]) :],
            drafts=NO_DRAFTS,
        )
        slot, here = 0 if written is None else written, there


def _one(value: int) -> Ints:
    return np.array([value], np.int32)


def ranges(low: Longs, counts: Longs) -> tuple[Longs, Longs]:
    """Return for every i the numbers low[i], low[i] + 1, ... (counts[i] of them), and the i they belong to, joined.

    >>> numbers, owners = ranges(np.array([5, 9]), np.array([3, 1]))
    >>> numbers.tolist(), owners.tolist()
    ([5, 6, 7, 9], [0, 0, 0, 1])
    """
    owners = np.repeat(np.arange(len(low)), counts)
    before = np.cumsum(counts) - counts
    return np.arange(len(owners)) + (low - before)[owners], owners
