"""Exact answers on a GPU: rows with drafts are verified in the form of decodes, and other steps run as always."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from weft.base.parts import rows_of_one, some_rows
from weft.base.plan import Plan
from weft.device.staging import StagedValue
from weft.device.upload import upload
from weft.kernels.interface import Batch
from weft.kernels.rows import ranges
from weft.runner.cuda.padding import Size
from weft.runner.cuda.recorded import StepOutput, step_sizes
from weft.runner.cuda.runner import CudaRunner
from weft.runner.runner import ComputedStep

Places = NDArray[np.int64]


class ExactCudaRunner(CudaRunner):
    """Runner on a GPU for exact answers. Steps with drafts are not recorded."""

    def recorded_sizes(self, seats: int) -> list[Size]:
        return step_sizes(seats, 0)

    def _replay(self, plan: Plan) -> StepOutput | None:
        return None if has_drafts(plan) else super()._replay(plan)

    def run_layers(self, plan: Plan, staged: StagedValue) -> ComputedStep:
        if not has_drafts(plan):
            return super().run_layers(plan, staged)
        assert not len(plan.drafts.on_device), "with exact answers on a GPU there is no head"
        sampling = self.upload(staged)
        decodes, others = by_form(plan)
        hidden: Tensor | None = None
        inputs = torch.empty(len(plan.tokens), dtype=torch.int64, device=self.device)
        for places, batch in (self._turns(plan, decodes), self._longer(plan, others)):
            if batch is None:
                continue
            found: Float[Tensor, "tokens hidden"] = self.compute(batch)
            if hidden is None:
                hidden = found.new_empty(len(plan.tokens), found.shape[1])
            where = upload({"places": places}, self.device)["places"]
            hidden[where], inputs[where] = found, batch.token_ids.long()
            computed = batch
        assert hidden is not None
        return ComputedStep(computed, sampling, inputs, hidden)

    def _turns(self, plan: Plan, rows: Places) -> tuple[Places, Batch]:
        """Return the places of these rows' tokens and their batch, in turns."""
        from weft.kernels.cuda.exact_turns import in_turns

        places = places_of(plan, rows)
        part = some_rows(plan, rows, places)
        single = rows_of_one(part, self.spec.cell)
        assert single is not None
        turn = single.start - np.repeat(part.start, part.end - part.start)
        order = np.argsort(turn, kind="stable")
        batch = self.build_batch(some_rows(single, order, order))
        return places[order], in_turns(batch, [int(size) for size in np.bincount(turn)])

    def _longer(self, plan: Plan, rows: Places) -> tuple[Places, Batch | None]:
        places = places_of(plan, rows)
        return places, self.build_batch(some_rows(plan, rows, places)) if len(rows) else None


def has_drafts(plan: Plan) -> bool:
    return bool(len(plan.drafts.counts) and plan.drafts.counts.any())


def by_form(plan: Plan) -> tuple[Places, Places]:
    """Return the rows that are decodes with or without drafts, and those that are prompts."""
    answering = plan.end - plan.start == plan.drafts.counts + 1
    return np.flatnonzero(answering), np.flatnonzero(~answering)


def places_of(plan: Plan, rows: Places) -> Places:
    """Return the places of some rows' tokens in the pack."""
    length = (plan.end - plan.start).astype(np.int64)
    places, _ = ranges((np.cumsum(length) - length)[rows], length[rows])
    return places
