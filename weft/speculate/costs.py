"""Costs of steps by their size, learned while serving: they decide how many drafts pay."""

from __future__ import annotations

from collections import deque
from typing import Protocol

# Durations kept of each size, and how many must be known before they count.
KEPT = 8
NEEDED = 2
# Steps after which the costs of drafts are learned anew.
FORGET_AFTER = 2048


class StepCosts(Protocol):
    """Durations of steps without prompts."""

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        """Record a landed step of `tokens` tokens, `drafts` of which were drafts."""

    def known(self, rows: int) -> bool:
        """Return whether the duration of a step of `rows` rows without drafts is known."""
        ...

    def ratio(self, rows: int, drafts: int) -> float:
        """Return how many times as long a step of `rows` rows takes with this number of drafts as without."""
        ...


class LearnedCosts:
    """The fastest of the last steps of about the same size. A larger step takes no less time than a smaller one.

    A step with drafts that is smaller than all seen so far counts as free, so it is tried. Now and then all of them
    are forgotten, because what was slow when it ran for the first time, or on a busy machine, would never be tried
    again. Steps without drafts are never guessed: if drafts came before they were measured, they would look free.
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._drafted: dict[int, deque[float]] = {}
        self._observed = 0

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        self._observed += 1
        if self._observed % FORGET_AFTER == 0:
            self._drafted.clear()
        table = self._drafted if drafts else self._plain
        table.setdefault(_size_class(tokens), deque(maxlen=KEPT)).append(seconds)

    def known(self, rows: int) -> bool:
        sizes = (size for size, found in self._plain.items() if len(found) >= NEEDED)
        return any(rows <= 2 * size and size <= 2 * rows for size in sizes)

    def ratio(self, rows: int, drafts: int) -> float:
        base, drafted = _known(self._plain, rows), _known(self._drafted, rows + drafts)
        if base is None:
            base = min((min(found) for found in self._plain.values() if len(found) >= NEEDED), default=None)
        return 1.0 if base is None or drafted is None else max(1.0, drafted / base)


def _known(table: dict[int, deque[float]], tokens: int) -> float | None:
    """Return the most that is known of steps of this size and smaller ones."""
    size = _size_class(tokens)
    known = [min(found) for each, found in table.items() if each <= size and len(found) >= NEEDED]
    return max(known, default=None)


class FreeDrafts:
    """Costs of a device where drafts cost nothing: every draft that may be accepted pays."""

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        """Learn nothing."""

    def known(self, rows: int) -> bool:
        return True

    def ratio(self, rows: int, drafts: int) -> float:
        return 1.0


def _size_class(tokens: int) -> int:
    """Return a step's size, rounded up to one of four between powers of two.

    >>> [_size_class(tokens) for tokens in (1, 7, 9, 11, 13, 100)]
    [1, 7, 10, 12, 14, 112]
    """
    step = max(1, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step
