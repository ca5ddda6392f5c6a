"""Exact answers on a GPU: rows with drafts are verified in the form of decodes, and other steps run as always."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from weft.base.parts import ranges, rows_of_one, some_rows
from weft.base.plan import Plan
from weft.device.staging import StagedValue
from weft.device.upload import upload
from weft.kernels.interface import Batch
from weft.runner.eager import ComputedStep, EagerSteps, UsualNumerics

Places = NDArray[np.int64]


class ExactTurns:
    """Numerics on a GPU for exact answers. Steps with drafts are not recorded."""

    scratch_units = 0
    records_drafts = False
    logit_rows: int | None = None

    def compute(self, plan: Plan, staged: StagedValue, steps: EagerSteps) -> ComputedStep:
        if not has_drafts(plan):
            return UsualNumerics().compute(plan, staged, steps)
        assert not len(plan.drafts.on_device), "with exact answers on a GPU there is no head"
        sampling, device = steps.upload(staged), steps.placed.device
        decodes, others = by_form(plan)
        hidden: Tensor | None = None
        inputs = torch.empty(len(plan.tokens), dtype=torch.int64, device=device)
        for places, batch in (turns_of(plan, decodes, steps), longer_rows(plan, others, steps)):
            if batch is None:
                continue
            found: Float[Tensor, "tokens hidden"] = steps.compute(batch)
            if hidden is None:
                hidden = found.new_empty(len(plan.tokens), found.shape[1])
            where = upload({"places": places}, device)["places"]
            hidden[where], inputs[where] = found, batch.token_ids.long()
            computed = batch
        assert hidden is not None
        return ComputedStep(computed, sampling, inputs, hidden)


def turns_of(plan: Plan, rows: Places, steps: EagerSteps) -> tuple[Places, Batch]:
    """Return the places of these rows' tokens and their batch, in turns."""
    from weft.kernels.cuda.exact_turns import in_turns

    places = places_of(plan, rows)
    part = some_rows(plan, rows, places)
    single = rows_of_one(part, steps.placed.spec.cell)
    assert single is not None
    turn = single.start - np.repeat(part.start, part.end - part.start)
    order = np.argsort(turn, kind="stable")
    batch = steps.batch_of(some_rows(single, order, order))
    return places[order], in_turns(batch, [int(size) for size in np.bincount(turn)])


def longer_rows(plan: Plan, rows: Places, steps: EagerSteps) -> tuple[Places, Batch | None]:
    places = places_of(plan, rows)
    return places, steps.batch_of(some_rows(plan, rows, places)) if len(rows) else None


def has_drafts(plan: Plan) -> bool:
    return bool(plan.drafts.counts.any())


def by_form(plan: Plan) -> tuple[Places, Places]:
    """Return the rows that are decodes with or without drafts, and those that are prompts."""
    answering = plan.end - plan.start == plan.drafts.counts + 1
    return np.flatnonzero(answering), np.flatnonzero(~answering)


def places_of(plan: Plan, rows: Places) -> Places:
    """Return the places of some rows' tokens in the pack."""
    length = (plan.end - plan.start).astype(np.int64)
    places, _ = ranges((np.cumsum(length) - length)[rows], length[rows])
    return places
