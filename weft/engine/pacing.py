"""How many prompt tokens a step computes, so that running streams do not wait too long for their next tokens.

A step with prompts takes as long as its decodes, which the costs of drafts know by size, plus what its chunk adds. The
bound holds for the prediction: a step is launched before its duration is known.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.base.config import EngineConfig
from weft.base.grid import floor_to_grid
from weft.base.plan import Plan
from weft.speculate.costs import ChunkCosts, LearnedCosts, StepCosts


class Pacing:
    """`costs` are those of steps without prompts. `shortened` counts the steps that the bound made shorter."""

    def __init__(self, config: EngineConfig, costs: StepCosts, cell: int) -> None:
        self.costs = costs
        self.chunks = ChunkCosts()
        self.shortened = 0
        self._floor = config.max_step_ms / 1000
        self._decodes = config.max_step_decodes
        self._cell = cell

    def use_sizes(self, padded: Callable[[int, int], int]) -> None:
        """Learn costs by the sizes that the device pads steps to: their tokens, by rows and drafts."""
        if isinstance(self.costs, LearnedCosts):
            self.costs.padded = padded

    @property
    def bounded(self) -> bool:
        return bool(self._floor or self._decodes)

    def bound(self, rows: int) -> float:
        """Return how long a step with `rows` decodes may take."""
        return max(self._floor, self._decodes * self.costs.seconds(rows, 0))

    def predicted(self, rows: int, drafts: int, prompts: int) -> float:
        """Return how long a step is expected to take, once a chunk was measured."""
        return self.costs.seconds(rows, drafts) + (self.chunks.seconds(prompts) if prompts else 0.0)

    def prompt_tokens(self, rows: int, drafts: int, most: int) -> int:
        """Return how many of `most` prompt tokens fit into a step with decodes: whole cells, and at least one."""
        found = 0
        if self.chunks.known:
            found = self.chunks.tokens(self.bound(rows) - self.costs.seconds(rows, drafts))
        return min(max(floor_to_grid(found, self._cell), self._cell), most)

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from a landed step."""
        drafts, tokens = plan.draft_counts, len(plan.tokens)
        count = int(drafts.sum())
        if tokens == plan.rows + count:
            self.costs.observe(tokens, count, seconds)
            return
        lengths = plan.end - plan.start
        prompts = lengths > 1 + drafts
        # A step without decodes has the cost of the smallest one as well, such as reading all weights.
        rows, tokens = max(1, int((~prompts).sum())), int(lengths[prompts].sum())
        others = self.costs.seconds(rows, count)
        if seconds <= others:
            # The decodes took less time than is assumed: at most that of the whole step.
            self.costs.observe(rows + count, count, seconds)
            others = seconds * rows / (rows + tokens)
        self.chunks.observe(tokens, seconds - others)
