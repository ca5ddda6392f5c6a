"""Measured rates, and what they say about loading a prefix from another tier or computing it again."""

from __future__ import annotations

# Weight of a new measurement.
SHARE = 0.2
# Copies smaller than this are dominated by their start.
LEAST_BYTES = 1 << 20
# Steps with fewer prompt tokens say little about the rate of prefill.
LEAST_TOKENS = 64
# A tier that is not loaded from cannot show that it has become faster: each load that would be slower than computing
# raises its rate by this factor, so that one is tried again now and then.
RECOVERY = 1.02
# A step takes this share of the time of a copy between device and host memory longer, if they run side by side: on an
# H200, copies of 9.8 of 55 GB/s make decodes 1.6 % longer.
COPY_PRICE = 0.1
# Loading is chosen only if it takes at most this share of the time that computing takes.
MARGIN = 0.9


class Rates:
    """Bytes per second of loads from a tier, and prompt tokens per second. None: not measured yet."""

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

    def declined(self) -> None:
        """Note a load that was not begun because computing is faster."""
        if self.load_bytes is not None:
            self.load_bytes *= RECOVERY

    def load_seconds(self, size_bytes: int) -> float | None:
        """Return how long a load takes, or None if no rate is known."""
        return None if self.load_bytes is None else size_bytes / self.load_bytes

    def compute_seconds(self, tokens: int) -> float | None:
        """Return how long a prefill takes, or None if no rate is known."""
        return None if self.prefill_tokens is None else tokens / self.prefill_tokens

    def copy_pays(self, chance: float, tokens: int, size_bytes: int) -> bool:
        """Return whether a copy to host memory costs less device time than it is expected to save.

        >>> rates = Rates(load_bytes=50e9, prefill_tokens=50e3)
        >>> rates.copy_pays(0.01, 5_000, 100 << 20), rates.copy_pays(0.001, 5_000, 100 << 20)
        (True, False)
        """
        copy, compute = self.load_seconds(size_bytes), self.compute_seconds(tokens)
        return copy is not None and compute is not None and chance * compute > COPY_PRICE * copy


def load_pays(load_seconds: float | None, compute_seconds: float | None) -> bool:
    """Return whether loading takes clearly less time than computing. Until both are known, it does.

    >>> load_pays(0.5, 1.0), load_pays(1.0, 1.0), load_pays(None, 1.0)
    (True, False, True)
    """
    return load_seconds is None or compute_seconds is None or load_seconds <= MARGIN * compute_seconds


def _refined(known: float | None, measured: float) -> float:
    return measured if known is None else known + SHARE * (measured - known)
