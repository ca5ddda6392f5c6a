"""Measures what a prompt token costs: a part that is the same for all, and one that grows with its position."""

from __future__ import annotations

# What is left of earlier steps' weight with each further one.
KEPT = 0.98
# Steps with fewer prompt tokens are dominated by decodes and by reading weights.
LEAST_TOKENS = 64


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
