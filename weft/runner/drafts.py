"""Decodes with drafts as rows of one token each: the form in which C++ kernels verify them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.base.plan import Ints, Plan
from weft.kernels.rows import Longs, ranges


def rows_of_one(plan: Plan, cell: int) -> Plan | None:
    """Return a plan with drafts as one of decodes: each token is a row, and those of a sequence lie side by side.

    A row reads what the rows before it of the same sequence write, so it needs kernels that compute them in order.
    None: the plan has no drafts, or longer rows besides.
    """
    length = plan.end - plan.start
    if not len(plan.drafts) or (length != plan.drafts + 1).any():
        return None
    position, row = ranges(plan.start.astype(np.int64), length.astype(np.int64))
    first = np.cumsum(length) - length
    captures = plan.captures
    writing = (first[captures.row] + captures.position - 1 - plan.start[captures.row]).astype(np.int32)
    from_board = np.zeros(len(row), np.int32)
    from_board[first] = plan.from_board
    return replace(
        plan,
        seat=plan.seat[row],
        start=position.astype(np.int32),
        end=(position + 1).astype(np.int32),
        from_board=from_board,
        read_slot=_slots_before(plan, position, row, cell),
        tail=plan.tail[row],
        page_table=plan.page_table[row],
        window_table=plan.window_table[row],
        window_first=plan.window_first[row],
        captures=replace(captures, row=writing),
        drafts=np.zeros(0, np.int32),
    )


def _slots_before(plan: Plan, position: Longs, row: Longs, cell: int) -> Ints:
    """Return the checkpoint before each token: the row's own, or from the next grid position on the one written there.

    A sequence that may be settled anywhere writes a checkpoint at every grid position of its row.
    """
    slots: Ints = plan.read_slot[row]
    captures = plan.captures
    for of_row, at, slot in zip(captures.row.tolist(), captures.position.tolist(), captures.slot.tolist(), strict=True):
        slots[(row == of_row) & (position // cell * cell == at)] = slot
    return slots
