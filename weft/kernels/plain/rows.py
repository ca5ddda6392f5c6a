"""Rows of a step, for loops over them."""

from __future__ import annotations

from dataclasses import dataclass

from weft.kernels.interface import Batch


@dataclass(frozen=True, slots=True)
class Row:
    """Positions [start, end) of a sequence: tokens [first, first + end - start) of the pack."""

    start: int
    end: int
    first: int
    tail: int
    slot: int | None  # checkpoint at `cell_start`; None in a sequence's first cell
    cell_start: int
    captures: dict[int, int]  # slots for the states at grid positions that the row passes

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.end - self.start)

    def packed(self, position: int) -> int:
        """Return the index in the pack of one of the row's new tokens."""
        return self.first + position - self.start


def rows_of_step(batch: Batch) -> list[Row]:
    found: list[Row] | None = batch.derived.get(Row)
    if found is None:
        assert batch.host is not None, "a recorded step has no rows on the host"
        plan, rows = batch.host.plan, batch.host.rows
        captures: list[dict[int, int]] = [{} for _ in range(plan.rows)]
        for row, position, slot in zip(
            *(part.tolist() for part in (plan.captures.row, plan.captures.position, plan.captures.slot))
        ):
            captures[row][position] = slot
        slots = [slot if start else None for slot, start in zip(rows.slots.tolist(), rows.cell_start.tolist())]
        start, end, first, tail, cell_start = (
            part.tolist() for part in (rows.start, rows.end, rows.first, plan.tail, rows.cell_start)
        )
        found = [Row(*one) for one in zip(start, end, first, tail, slots, cell_start, captures)]
        batch.derived[Row] = found
    return found
