"""The device of an engine on a GPU: decodes are replayed, everything else runs eagerly, and nobody waits in between."""

from __future__ import annotations

import torch
from tqdm import tqdm

from weft.base.plan import Plan
from weft.kernels.draft import Draft
from weft.memory.device.store import Store
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.choices import Choices, draft_choices
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.recorded import RecordedDecodes
from weft.runner.runner import Runner, RunnerFlight, fly
from weft.runner.upload import upload


class CudaRunner(Runner):
    """`max_length` is how far a row can reach. On a CPU (in tests) the same way is taken without recording."""

    def __init__(
        self,
        model: CausalModel,
        spec: MemorySpec,
        budget_bytes: int,
        seats: int,
        max_length: int,
        device: torch.device | str = "cuda",
        progress: bool = False,
    ) -> None:
        self.model, self.spec, self.device = model, spec, torch.device(device)
        self.store = Store(spec, budget_bytes, self.device, scratch=True)
        # One line more than seats: that of padding.
        self.board = torch.zeros(seats + 1, dtype=torch.int64, device=self.device)
        cells = -(-max_length // spec.cell)
        self.inputs = DecodeInputs(seats, cells, spec, self.store.scratch, self.device)
        if self.device.type == "cuda":
            # A library that compiles for a size of heads takes a minute the first time on a machine.
            for mixer in tqdm(model.mixers(), desc="warming kernels", unit="layer", disable=not progress):
                mixer.warm()
        with torch.inference_mode():
            self.decodes = RecordedDecodes(model, self.store.views, self.board, self.inputs, progress)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RunnerFlight:
        for kind, index in plan.poison:
            self.store.poison(kind, index)
        if len(plan.tokens) > plan.rows or len(plan.score_index) or not len(plan.sampled):
            return self.run(plan, lanes=True)
        size = self.decodes.size_for(plan.rows)
        self.inputs.fill(plan, size)
        outcome = self.decodes.run(size)
        every = len(plan.sampled) == plan.rows
        if every and plan.sampling.all_greedy and not plan.sampling.wants_logprobs:
            return fly(outcome.tokens[: plan.rows], None, None)
        choices = self._choices(plan)
        logits = outcome.logits[: plan.rows] if every else outcome.logits[choices.index]
        return self.choose(logits, choices)

    def _choices(self, plan: Plan) -> Choices:
        draft: Draft = draft_choices(plan, self.model.vocab_size)
        return draft.finish(upload(draft.arrays(), self.device))
