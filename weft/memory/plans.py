"""Builds plans of rows in the memory that a ledger has given them: the model's, and those of a draft model."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.base.plan import NO_CAPTURES, NO_DRAFTS, Captures, Ints, Longs, Plan, Sampling, StepDrafts
from weft.memory.lease import Grant
from weft.memory.ledger import Ledger


def build_plan(
    ledger: Ledger,
    number: int,
    rows: tuple[Longs, Longs, Longs],
    tokens: Ints,
    from_board: Ints,
    grants: dict[int, Grant],
    sampled: Ints,
    sampling: Sampling,
    drafts: StepDrafts = NO_DRAFTS,
    **scores: Any,
) -> Plan:
    """Return the plan of rows, (seats, start, end), in the memory that a ledger has given them."""
    seats, start, end = rows
    lowest = start - drafts.unverified_before if drafts.may_move else start
    places = ledger.locate(seats, lowest, end, grants)
    return Plan.build(
        number=number,
        seat=seats.astype(np.int32),
        start=start.astype(np.int32),
        end=end.astype(np.int32),
        tokens=tokens,
        from_board=from_board,
        **places._asdict(),
        captures=planned_captures(grants),
        sampled=sampled,
        sampling=sampling,
        poison=ledger.take_freed(),
        drafts=drafts,
        **scores,
    )


def planned_captures(grants: dict[int, Grant]) -> Captures:
    if not grants:
        return NO_CAPTURES
    found = [(row, c.position, c.slot) for row, g in grants.items() for c in g.captures if c.slot is not None]
    table = np.array(found, np.int32).reshape(-1, 3)
    return Captures(*(np.ascontiguousarray(table[:, i]) for i in range(3)))
