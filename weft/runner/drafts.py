"""Decodes with drafts as rows of one token each: the form in which C++ kernels verify them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.base.plan import Ints, Plan
from weft.kernels.rows import Longs


def rows_of_one(plan: Plan, cell: int) -> Plan | None:
    """Return a plan with drafts as one of decodes: each token is a row, and those of a sequence lie side by side.

    A row reads what the rows before it of the same sequence write, so it needs kernels that compute them in order.
    None: the plan has no drafts, or longer rows besides.
    """
    # A row has at least one token besides its drafts.
    if not len(plan.drafts) or len(plan.tokens) != plan.rows + int(plan.drafts.sum()):
        return None
    count = plan.drafts + 1
    row, first = np.repeat(np.arange(plan.rows), count), np.cumsum(count) - count
    position = np.arange(len(row)) + (plan.start - first)[row]
    captures = plan.captures
    if len(captures.row):
        writing = (first[captures.row] + captures.position - 1 - plan.start[captures.row]).astype(np.int32)
        captures = replace(captures, row=writing)
    from_board = np.zeros(len(row), np.int32)
    from_board[first] = plan.from_board
    start = position.astype(np.int32)
    return replace(
        plan,
        seat=plan.seat[row],
        start=start,
        end=start + 1,
        from_board=from_board,
        read_slot=_slots_before(plan, position, row, cell),
        tail=plan.tail[row],
        page_table=plan.page_table[row],
        window_table=plan.window_table[row],
        window_first=plan.window_first[row],
        captures=captures,
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


def has_drafts(plan: Plan) -> bool:
    return bool(len(plan.drafts) and plan.drafts.any())
