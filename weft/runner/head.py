"""Runner of an MTP head, which reads the hidden states that the model's own runner keeps."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.base.moving import move_rows
from weft.base.plan import Ints, Plan
from weft.device.staging import StagedValue
from weft.device.upload import upload
from weft.kernels.interface import Batch
from weft.runner.batching import build_step
from weft.runner.hidden_states import HiddenStates, ReadsStates
from weft.runner.runner import ComputedStep, Flight, Runner
from weft.runner.step_sampling import StepSampling


class HeadSteps(Runner):
    """Steps of a head, for any runner. Its guesses stay on the board of the hidden states."""

    use: ReadsStates
    # Samples of the step whose row continues from the head's own output.
    _continues: Ints
    # Whether it guesses among the frequent tokens only.
    _frequent = False

    def run_layers(self, plan: Plan, staged: StagedValue) -> ComputedStep:
        batch, sampling = build_step(plan, self.spec, self.board, self.device, self.operations, staged)
        hidden = self.use.compute(self.model, batch, self.store.views, self.lines_of(plan, self.use))
        self.use.chosen(hidden[sampling.index], sampling.seat)
        self._continues, self._frequent = plan.from_board[plan.sampled], plan.drafts.frequent_only
        return ComputedStep(batch, sampling, batch.token_ids, hidden)

    def logits_of(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        return self.use.logits(self.model, hidden, batch, self._frequent)

    def decide(
        self, logits: Float[Tensor, "rows vocab"], sampling: StepSampling, inputs: Int[Tensor, " tokens"]
    ) -> Int[Tensor, " rows"]:
        tokens = super().decide(logits, sampling, inputs)
        continues = upload({"continues": self._continues}, self.device, widen=False)["continues"]
        self.use.states.board.guessed(tokens, sampling.seat, continues)
        return tokens

    def keep_hidden(self, plan: Plan, hidden: Float[Tensor, "tokens hidden"]) -> None:
        """Keep nothing: entries of a head are made of the model's states."""


class HeadRunner(HeadSteps):
    """Executes plans of an MTP head, operation by operation."""

    def __init__(self, hidden: HiddenStates, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.use = ReadsStates(hidden)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        # Rows start earlier by what the model refused, not the head.
        if plan.drafts.may_move:
            plan = move_rows(plan, self.use.states.board.refused.numpy()[plan.seat], self.spec.cell)
        return super().launch(plan)
