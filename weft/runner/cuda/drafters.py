"""Drafters on a GPU: a draft model, and the MTP head of the model. Their steps are recorded like the model's."""

from __future__ import annotations

from typing import Any

from weft.runner.cuda.runner import CudaRunner
from weft.runner.head import HeadSteps
from weft.runner.hidden_states import HiddenStates, ReadsStates


class CudaDrafter(CudaRunner):
    """Runner of a draft model."""

    drafter = True


class CudaHead(HeadSteps, CudaDrafter):
    """Runner of an MTP head."""

    use: ReadsStates

    def follows(self, decodes: int, drafting: int, tokens: int) -> bool:
        """Return whether a step that reads as many tokens of rows with drafts in flight is recorded."""
        sizes = (inputs.size for inputs in self.recorded.prompts)
        return any(size.holds(decodes, drafting, tokens, decodes + drafting) for size in sizes)

    def __init__(self, hidden: HiddenStates, *args: Any, **more: Any) -> None:
        more["use"] = ReadsStates(hidden)
        super().__init__(*args, **more)
