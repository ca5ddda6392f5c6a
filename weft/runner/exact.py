"""Execution of plans on a CPU in passes of canonical shape, so that a token's bits do not depend on the rest of a step.

PyTorch's operators round differently for other shapes. Here a pass is either one cell's tokens of one row, or rows of
one token each. The shape of the former depends only on the row's own position; the latter are computed by C++ kernels,
whose rows do not see each other, or one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from weft.base.parts import cells_of, ranges, rows_of_one, some_rows
from weft.base.plan import Plan
from weft.device.staging import StagedValue
from weft.kernels.interface import Batch
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
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

    Drafts are rows of one token each.
    """
    length = (plan.end - plan.start).astype(np.int64)
    first = np.cumsum(length) - length
    drafts = plan.draft_counts
    answering = length == drafts + 1
    if answering.any():
        rows = np.flatnonzero(answering)
        places, _ = ranges(first[rows], length[rows])
        chosen = some_rows(plan, rows, places)
        single = rows_of_one(chosen, spec.cell)
        for low in range(0, len(places), at_once):
            part = slice(low, low + at_once)
            yield Pass(some_rows(single or chosen, part, part), places[part], single is not None)
    for row in np.flatnonzero(~answering).tolist():
        for piece in cells_of(plan, row, spec.cell, spec.window, scratch):
            begin = first[row] + int(piece.start[0] - plan.start[row])
            yield Pass(piece, np.arange(begin, begin + len(piece.tokens)))


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
    each = (slice(row, row + 1) for row in range(plan.rows))
    hidden: Tensor = torch.cat([steps.compute(steps.batch_of(some_rows(plan, row, row))).clone() for row in each])
    return hidden
