"""Measured rates, and the decision that they are for: load a prefix from another tier, or compute it again."""

from __future__ import annotations

# Weight of a new measurement.
SHARE = 0.2
# Copies smaller than this are dominated by their start.
LEAST_BYTES = 1 << 20
# Steps with fewer prompt tokens say little about the rate of prefill.
LEAST_TOKENS = 128
# Loading is chosen only if it takes at most this share of the time that computing takes.
MARGIN = 0.9


class Rates:
    """Bytes per second of loads, and prompt tokens per second. None: not measured yet."""

    def __init__(self, load_bytes: float | None = None, prefill_tokens: float | None = None) -> None:
        self.load_bytes = load_bytes
        self.prefill_tokens = prefill_tokens

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """Refine the rate of loads."""
        if size_bytes >= LEAST_BYTES and seconds > 0:
            self.load_bytes = _refined(self.load_bytes, size_bytes / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Refine the rate of prefill."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            self.prefill_tokens = _refined(self.prefill_tokens, tokens / seconds)

    def load_pays(self, size_bytes: int, queued_bytes: int, tokens: int) -> bool:
        """Return whether loading `size_bytes`, behind others in the queue, takes less time than computing `tokens`.

        Until both rates are measured, it does.

        >>> Rates(1e9, 1e4).load_pays(10**6, 0, 100), Rates(1e9, 1e4).load_pays(10**8, 0, 100)
        (True, False)
        """
        if self.load_bytes is None or self.prefill_tokens is None:
            return True
        loading = (size_bytes + queued_bytes) / self.load_bytes
        return loading <= MARGIN * tokens / self.prefill_tokens


def _refined(known: float | None, measured: float) -> float:
    return measured if known is None else known + SHARE * (measured - known)
