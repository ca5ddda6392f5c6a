"""A runner whose model is one rank's part. The first rank decides what is sampled, the others learn it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.interface import Operations
from weft.kernels.ranks import RankGroup, over_ranks
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.runner import Runner
from weft.runner.step_sampling import StepSampling


class RankRunner(Runner):
    """Executes plans together with the runners of the other ranks, which launch the same plans in the same order."""

    def __init__(
        self,
        group: RankGroup,
        operations: Operations,
        model: CausalModel,
        spec: MemorySpec,
        budget_bytes: int,
        seats: int,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        super().__init__(model, spec, budget_bytes, seats, device, threads, over_ranks(operations, group))
        self.group = group

    def decide(
        self, logits: Float[Tensor, "rows vocab"], sampling: StepSampling, inputs: Int[Tensor, " tokens"]
    ) -> Int[Tensor, " rows"]:
        """Return the tokens that the first rank chose: ties and rounding are decided once."""
        if self.group.rank == 0:
            return self.group.from_first(super().decide(logits, sampling, inputs).long())
        return self.group.from_first(logits.new_empty(len(logits), dtype=torch.int64))
