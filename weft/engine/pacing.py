"""How far a step computes prompts, so that running streams do not wait too long for their next tokens.

A step with prompts takes as long as its decodes, which the costs of drafts know by size, plus what its chunk adds. The
bound holds for the prediction: a step is launched before its duration is known.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.base.config import EngineConfig
from weft.base.grid import floor_to_grid
from weft.base.plan import Plan
from weft.drafting.policy.costs import ChunkCosts, LearnedCosts, StepCosts


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
        tokens, counts = len(plan.tokens), plan.drafts.counts
        count = int(counts.sum()) if len(counts) else 0
        if tokens == plan.rows + count:
            self.costs.observe(tokens, count, seconds)
            return
        drafts = plan.draft_counts
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


def even_chunk(left: int, most: int, cell: int) -> int:
    """Return how many of the tokens that are left to compute in a step, if no step may have more than `most`.

    A prompt that departs is cut into chunks of about the same size. What its last chunk computes leaves while later
    layers of that chunk are computed, which takes too short a time if the chunk is what others have left.

    >>> even_chunk(8192, 8192, 64), even_chunk(8256, 8192, 64), even_chunk(64, 8192, 64), even_chunk(100, 7, 64)
    (8192, 4160, 64, 7)
    """
    chunk = -(-left // -(-left // most))
    return min(most, -(-chunk // cell) * cell)


def canonical_end(start: int, budget: int, prompt: int, total: int, cell: int) -> int:
    """Return where a row from `start` ends, so that every token is computed in the form of a lone, cold run.

    A row of a prompt ends on the grid or at the prompt's end; to get there it may exceed the budget by less than a
    cell. If the prompt's last cell has one token, that is a row of its own. Tokens generated before a preemption, from
    `prompt` to `total`, return one at a time, as they came.

    >>> canonical_end(0, 100, 200, 200, 64), canonical_end(128, 100, 200, 200, 64), canonical_end(64, 10, 200, 200, 64)
    (64, 200, 128)
    >>> canonical_end(0, 500, 129, 129, 64), canonical_end(128, 500, 129, 129, 64), canonical_end(150, 9, 150, 200, 64)
    (128, 129, 151)
    """
    if start >= prompt:
        return min(total, start + 1)
    assert start % cell == 0, start
    end = prompt if start + budget >= prompt else max(floor_to_grid(start + budget, cell), start + cell)
    end = min(end, prompt)
    return end - 1 if end == prompt and end % cell == 1 and end > start + 1 else end
