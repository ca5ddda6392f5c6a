"""A runner whose model is one rank's part. The first rank decides what is sampled, the others learn it."""

from __future__ import annotations

from typing import Any

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
        self, group: RankGroup, model: CausalModel, spec: MemorySpec, budget_bytes: int, seats: int, **more: Any
    ) -> None:
        operations: Operations = more.pop("operations")
        super().__init__(model, spec, budget_bytes, seats, operations=over_ranks(operations, group), **more)
        self.group = group

    def decide(self, logits: Float[Tensor, "rows vocab"], sampling: StepSampling) -> Int[Tensor, " rows"]:
        """Return the tokens that the first rank chose: ties and rounding are decided once."""
        if self.group.rank == 0:
            return self.group.from_first(super().decide(logits, sampling).long())
        return self.group.from_first(torch.empty(len(logits), dtype=torch.int64, device=logits.device))
