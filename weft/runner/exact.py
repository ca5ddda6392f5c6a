"""Execution of plans on a CPU in passes of canonical shape, so that a token's bits do not depend on the rest of a step.

PyTorch's operators round differently for other shapes. Here a pass is either one cell's tokens of one row, or rows of
one token each. The shape of the former depends only on the row's own position; the latter are computed by C++ kernels,
whose rows do not see each other, or one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from weft.base.grid import first_window_cell, floor_to_grid
from weft.base.plan import Captures, Plan
from weft.device.staging import StagedValue
from weft.kernels.interface import Batch
from weft.kernels.rows import ranges
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.runner.drafts import rows_of_one
from weft.runner.eager import ComputedStep, EagerSteps, UsualNumerics


@dataclass(frozen=True, slots=True)
class Pass:
    """A part of a plan that is computed by itself, and the places of its tokens in the pack.

    `in_order`: neighbouring rows may be of one sequence, the certain token and its drafts.
    """

    plan: Plan
    places: NDArray[np.int64]
    in_order: bool = False


def canonical_passes(plan: Plan, spec: MemorySpec, at_once: int, scratch: tuple[int, int]) -> Iterator[Pass]:
    """Cut a plan into passes: up to `at_once` rows of one token, then cell by cell.

    Drafts are rows of one token each. Between two cells of a row, a state that the plan does not keep goes to one of
    two `scratch` slots.
    """
    length = (plan.end - plan.start).astype(np.int64)
    first = np.cumsum(length) - length
    drafts = plan.drafts if len(plan.drafts) else np.zeros(plan.rows, np.int32)
    answering = length == drafts + 1
    if answering.any():
        rows = np.flatnonzero(answering)
        places, _ = ranges(first[rows], length[rows])
        chosen = chosen_rows(plan, rows, places)
        single = rows_of_one(chosen, spec.cell)
        for low in range(0, len(places), at_once):
            high = min(len(places), low + at_once)
            yield Pass(rows_of(single or chosen, low, high), places[low:high], single is not None)
    for row in np.flatnonzero(~answering).tolist():
        for piece in pieces_of(plan, row, spec, scratch):
            begin = first[row] + int(piece.start[0] - plan.start[row])
            yield Pass(piece, np.arange(begin, begin + len(piece.tokens)))


NO_DRAFTS = np.zeros(0, np.int32)
BY_ROW = ("seat", "start", "end", "from_board", "read_slot", "tail", "page_table", "window_table", "window_first")


def chosen_rows(plan: Plan, rows: NDArray[np.int64], places: NDArray[np.int64]) -> Plan:
    """Return a plan of some rows, whose tokens are at these places."""
    number = np.full(plan.rows, -1, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    ours = number[plan.captures.row] >= 0
    captures = Captures(number[plan.captures.row[ours]], plan.captures.position[ours], plan.captures.slot[ours])
    fields: dict[str, Any] = {name: getattr(plan, name)[rows] for name in BY_ROW}
    drafts = plan.drafts[rows] if len(plan.drafts) else plan.drafts
    return replace(plan, tokens=plan.tokens[places], captures=captures, drafts=drafts, **fields)


def rows_of(plan: Plan, first: int, end: int) -> Plan:
    """Return a plan of some rows of one token each."""
    rows = slice(first, end)
    ours = (plan.captures.row >= first) & (plan.captures.row < end)
    captures = Captures(plan.captures.row[ours] - first, plan.captures.position[ours], plan.captures.slot[ours])
    fields: dict[str, Any] = {name: getattr(plan, name)[rows] for name in BY_ROW}
    return replace(plan, tokens=plan.tokens[rows], captures=captures, drafts=NO_DRAFTS, **fields)


def pieces_of(plan: Plan, row: int, spec: MemorySpec, scratch: tuple[int, int]) -> Iterator[Plan]:
    """Yield a plan for each cell of a row of several tokens."""
    ours = plan.captures.row == row
    slots = dict(zip(plan.captures.position[ours].tolist(), plan.captures.slot[ours].tolist(), strict=True))
    start, end, cell = int(plan.start[row]), int(plan.end[row]), spec.cell
    packed = int((plan.end - plan.start)[:row].sum())
    bare = replace(plan, tokens=np.zeros(plan.rows, np.int32), end=plan.start + 1, drafts=NO_DRAFTS)
    lone = rows_of(bare, row, row + 1)
    slot, here = int(plan.read_slot[row]), start
    while here < end:
        there = min(end, floor_to_grid(here, cell) + cell)
        written = slots.get(there)
        if written is None and there < end:
            # Never the slot that this pass reads.
            written = scratch[there // cell % 2]
        captures = [] if written is None else [(0, there, written)]
        tokens = plan.tokens[packed + here - start : packed + there - start]
        yield replace(
            lone,
            start=ints(here),
            end=ints(there),
            tokens=tokens,
            from_board=lone.from_board if here == start else ints(0),
            read_slot=ints(slot),
            captures=Captures(*np.array(captures, np.int32).reshape(-1, 3).T),
            **windowed(lone, here, spec),
        )
        slot, here = 0 if written is None else written, there


def windowed(lone: Plan, start: int, spec: MemorySpec) -> dict[str, Any]:
    """Return the window pages that a row from `start` sees, and no earlier ones."""
    if spec.window is None:
        return {}
    first = first_window_cell(start, spec.window, spec.cell)
    passed = first - int(lone.window_first[0])
    return {"window_first": ints(first), "window_table": lone.window_table[:, passed:]}


def ints(value: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([value], np.int32)


class ExactCells:
    """Numerics on a CPU whose results have the same bits in any batch. `at_once` rows of one token share a pass."""

    scratch_units = 2
    records_drafts = False

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once
        self.logit_rows: int | None = at_once

    def compute(self, plan: Plan, staged: StagedValue, steps: EagerSteps) -> ComputedStep:
        if plan.rows == len(plan.tokens) <= self.at_once:
            # One token of each row is one pass: nothing to cut.
            return UsualNumerics().compute(plan, staged, steps)
        placed, sampling = steps.placed, steps.upload(staged)
        first = placed.store.scratch.get(Kind.STATE, 0)
        hidden: Tensor | None = None
        inputs = torch.empty(len(plan.tokens), dtype=torch.int64)
        for part in canonical_passes(plan, placed.spec, self.at_once, (first, first + 1)):
            batch = steps.batch_of(part.plan)
            found = in_order(part.plan, batch, steps) if part.in_order else steps.compute(batch)
            if hidden is None:
                hidden = found.new_empty(len(plan.tokens), found.shape[1])
            places = torch.from_numpy(part.places)
            hidden[places], inputs[places] = found, batch.token_ids.long()
        assert hidden is not None
        return ComputedStep(batch, sampling, inputs, hidden)


def in_order(plan: Plan, batch: Batch, steps: EagerSteps) -> Float[Tensor, "rows hidden"]:
    """Return the hidden states of rows of one token, each of which may read what the row before it writes."""
    found = steps.in_order(plan, batch)
    if found is not None:
        return found
    rows = [steps.compute(steps.batch_of(rows_of(plan, row, row + 1))).clone() for row in range(plan.rows)]
    hidden: Tensor = torch.cat(rows)
    return hidden
