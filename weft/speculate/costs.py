"""Costs of steps by their size, learned while serving: they decide how many drafts pay."""

from __future__ import annotations

from collections import deque
from typing import Protocol

# Durations kept of each size, and how many must be known before they count.
KEPT = 8
NEEDED = 2


class StepCosts(Protocol):
    """Durations of steps without prompts."""

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        """Record a landed step of `tokens` tokens, `drafts` of which were drafts."""

    def ratio(self, rows: int, drafts: int) -> float:
        """Return how many times as long a step of `rows` rows takes with this number of drafts as without."""
        ...


class LearnedCosts:
    """The fastest of the last steps of about the same size. A size not seen yet counts as free, so it is tried."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], deque[float]] = {}

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        self._seconds.setdefault(_bucket(tokens, drafts), deque(maxlen=KEPT)).append(seconds)

    def ratio(self, rows: int, drafts: int) -> float:
        base, with_drafts = self._known(rows, 0), self._known(rows + drafts, drafts)
        return 1.0 if base is None or with_drafts is None else max(1.0, with_drafts / base)

    def _known(self, tokens: int, drafts: int) -> float | None:
        seconds = self._seconds.get(_bucket(tokens, drafts), ())
        return min(seconds) if len(seconds) >= NEEDED else None


class FreeDrafts:
    """Costs of a device where drafts cost nothing: every draft that may be accepted pays."""

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        """Learn nothing."""

    def ratio(self, rows: int, drafts: int) -> float:
        return 1.0


def _bucket(tokens: int, drafts: int) -> tuple[bool, int]:
    """Return the size class of a step: with and without drafts apart, because they run different code.

    >>> _bucket(1, 0), _bucket(9, 4), _bucket(11, 4), _bucket(13, 4)
    ((False, 1), (True, 10), (True, 12), (True, 14))
    """
    step = max(1, 1 << max(0, tokens.bit_length() - 3))
    return drafts > 0, -(-tokens // step) * step
