"""Runner of an MTP head, which reads the hidden states that the model's own runner keeps."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from weft.base.plan import Plan
from weft.kernels.staging import StagedValue
from weft.runner.batching import build_step
from weft.runner.hidden_states import HiddenStates, ReadsStates
from weft.runner.runner import ComputedStep, Runner


class HeadSteps(Runner):
    """Steps of a head, for any runner."""

    use: ReadsStates

    def run_layers(self, plan: Plan, staged: StagedValue) -> ComputedStep:
        batch, sampling = build_step(plan, self.spec, self.board, self.device, self.operations, staged)
        hidden = self.use.compute(self.model, batch, self.store.views, self.lines_of(plan, self.use))
        self.use.chosen(hidden[sampling.index], sampling.seat)
        return ComputedStep(batch, sampling, batch.token_ids, hidden)

    def keep_hidden(self, plan: Plan, hidden: Float[Tensor, "tokens hidden"]) -> None:
        """Keep nothing: entries of a head are made of the model's states."""


class HeadRunner(HeadSteps):
    """Executes plans of an MTP head, operation by operation."""

    def __init__(self, hidden: HiddenStates, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.use = ReadsStates(hidden)
