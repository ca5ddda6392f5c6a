"""How busy an engine is: what it measures of its own steps, and a value that it reports to a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.base.plan import Plan
from weft.engine.planner import Planner
from weft.memory.report import memory_load

# Weight of a new step in the mean duration.
SHARE = 0.1
# What is left of earlier steps' weight with each further one.
KEPT = 0.98
# Steps with fewer prompt tokens are dominated by decodes and by reading weights.
LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A counter since the engine's start, current gauges, and measured rates. None: not measured yet.

    `prompt_tokens` counts prompt tokens computed, and `prompt_pairs` the pairs of each with an earlier token. Loading
    `n` tokens from a lower tier takes `n * token_bytes + point_bytes` divided by the rate of loads.
    """

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    running: int = 0
    waiting: int = 0
    max_sequences: int = 0  # seats; 0: not known
    used_memory: float = 0.0  # share of the memory that holds something, cached or in use
    memory_bytes: int = 0
    held_bytes: int = 0  # of it, what running sequences need: it cannot be evicted
    step_seconds: float = 0.0  # of the last steps, on average
    token_seconds: float | None = None  # to compute a prompt token, without its pairs
    pair_seconds: float = 0.0
    load_bytes_per_second: float | None = None
    token_bytes: float = 0.0
    point_bytes: int = 0
    send_bytes_per_second: float | None = None  # of prefixes, to decode engines

    def load_seconds(self, tokens: int) -> float:
        """Return how long loading a resume point and the pages of `tokens` before it takes."""
        size = tokens * self.token_bytes + self.point_bytes
        return size / self.load_bytes_per_second if self.load_bytes_per_second else 0.0


class PromptCosts:
    """Fits seconds per token of a step to a line over the mean position of its tokens, by weighted least squares.

    A step's weight is its number of prompt tokens. Without steps at different positions, the line is level.
    """

    def __init__(self) -> None:
        self.token_seconds: float | None = None
        self.pair_seconds = 0.0
        self._weight = self._position = self._seconds = 0.0
        # Sums of squares and products of the deviations from the means.
        self._spread = self._slope = 0.0

    def computed(self, tokens: int, pairs: float, seconds: float) -> None:
        """Refine the line with a step of this many prompt tokens and pairs."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        position, cost = pairs / tokens, seconds / tokens
        kept = KEPT * self._weight
        self._weight = kept + tokens
        share = tokens / self._weight
        away = position - self._position
        self._position += share * away
        self._spread = KEPT * self._spread + kept * share * away * away
        self._slope = KEPT * self._slope + kept * share * away * (cost - self._seconds)
        self._seconds += share * (cost - self._seconds)
        self._fit()

    def _fit(self) -> None:
        slope = self._slope / self._spread if self._spread > 0 else 0.0
        # No part may be negative: neither attention nor the rest is faster than nothing.
        self.pair_seconds = min(max(0.0, slope), self._seconds / self._position if self._position else 0.0)
        self.token_seconds = max(0.0, self._seconds - self.pair_seconds * self._position)


class StepClock:
    """Measures steps: the time from one landing, or the start of a launch into an idle device, to the next landing.

    `now` is a clock in seconds. `costs` learn what prompt tokens cost; `computed` and `observe`, if given, learn too.
    """

    def __init__(
        self,
        now: Callable[[], float],
        computed: Callable[[int, float], None] | None = None,
        observe: Callable[[Plan, float], None] | None = None,
    ) -> None:
        self.prompt_tokens = 0
        self.prompt_pairs = 0.0
        self.step_seconds = 0.0
        # From a landing that a step waited for to its launch.
        self.wait_seconds = 0.0
        self.costs = PromptCosts()
        self._now = now
        self._computed = computed
        self._observe = observe
        self._since: float | None = None
        # When the last flight landed, and whether it carried drafts; when the engine last had nothing to do.
        self._landed_at = self._resumed_at = 0.0
        self._landed_drafts = False

    def resumed(self, now: float) -> None:
        """Take note that nothing was in flight or running at this time."""
        self._resumed_at = now

    def launched(self, alone: bool, waited: bool = False) -> None:
        now = self._now()
        if waited and self._since is not None:
            self.wait_seconds += SHARE * (now - self._since - self.wait_seconds)
        if alone:
            self._since = now

    @property
    def lost(self) -> float:
        """Return what share of a step the device is idle if the next one waits for its landing."""
        return self.wait_seconds / self.step_seconds if self.step_seconds else 0.0

    def landed(self, plan: Plan) -> None:
        now, tokens, pairs = self._now(), 0, 0.0
        if self._observe is not None:
            self._observe_step(plan, now, self._observe)
        # Rows with drafts come last and belong to no prompt.
        prompts = slice(plan.decode_rows, plan.rows - int(np.count_nonzero(plan.drafts.counts)))
        if prompts.start < prompts.stop:
            start, end = plan.start[prompts].astype(np.float64), plan.end[prompts].astype(np.float64)
            tokens, pairs = int((end - start).sum()), float(((end - start) * (start + end)).sum() / 2)
        if self._since is not None:
            self.costs.computed(tokens, pairs, now - self._since)
            if self._computed is not None:
                self._computed(tokens, now - self._since)
            self.step_seconds += SHARE * (now - self._since - self.step_seconds)
        self._since = now
        self.prompt_tokens += tokens
        self.prompt_pairs += pairs

    def _observe_step(self, plan: Plan, now: float, observe: Callable[[Plan, float], None]) -> None:
        """Learn how long a step took: from the landing before it to its own.

        At depth 1, a step with drafts may be planned after the landing before it: then this includes what the device
        waits for the host. The step after it may wait too: without drafts of its own, it does not count.
        """
        seconds, after_drafts = now - max(self._resumed_at, self._landed_at), self._landed_drafts
        self._landed_at, self._landed_drafts = now, bool(len(plan.drafts.counts) and plan.drafts.counts.any())
        if self._landed_drafts or not after_drafts:
            observe(plan, seconds)


def load_of(
    planner: Planner, prompt_tokens: int, prompt_pairs: float, step_seconds: float, costs: PromptCosts
) -> ReplicaLoad:
    """Return the load of an engine that has computed these prompt tokens and pairs, with steps of this length."""
    return ReplicaLoad(
        prompt_tokens=prompt_tokens,
        prompt_pairs=prompt_pairs,
        running=planner.running + len(planner.leaving),
        waiting=len(planner.queue),
        max_sequences=planner.config.max_sequences,
        step_seconds=step_seconds,
        token_seconds=costs.token_seconds,
        pair_seconds=costs.pair_seconds,
        **memory_load(planner.ledger),
    )


def planner_stats(planner: Planner) -> dict[str, Any]:
    """Return counters and gauges of the planner by name."""
    found: dict[str, Any] = {
        "running": planner.running + len(planner.leaving),
        "waiting": len(planner.queue),
        "preemptions": planner.preemptions,
        "steps": planner.number,
        "shortened_steps": planner.pacing.shortened,
    }
    if planner.drafting is not None:
        found["drafts"] = planner.drafting.counts.stats()
    return found
