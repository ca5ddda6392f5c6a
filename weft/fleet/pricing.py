"""Prices a replica in seconds: what computing takes there, and how long a request waits before it can start.

Pure functions of values; the router feeds them with what replicas report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Prompt tokens to compute, and the pairs of each with an earlier token, which attention visits."""

    tokens: float
    pairs: float

    @classmethod
    def between(cls, start: int, end: int) -> PromptWork:
        """Return the work of computing the tokens from `start` to `end` of a prompt."""
        return cls(end - start, (end - start) * (start + end) / 2)


@dataclass(frozen=True, slots=True)
class PromptSpeed:
    """Seconds for each prompt token, and for each of its pairs."""

    token_seconds: float
    pair_seconds: float = 0.0

    def seconds(self, work: PromptWork) -> float:
        return work.tokens * self.token_seconds + work.pairs * self.pair_seconds


def mean_speed(speeds: Sequence[PromptSpeed]) -> PromptSpeed | None:
    """Return the mean of measured speeds, or None without any."""
    if not speeds:
        return None
    tokens, pairs = sum(each.token_seconds for each in speeds), sum(each.pair_seconds for each in speeds)
    return PromptSpeed(tokens / len(speeds), pairs / len(speeds))


def seconds_until_released(ahead: int, own: int, holders: int, holding_seconds: float) -> float:
    """Return the expected time until requests ahead have taken the places of `ahead` holders, and `own` more have left.

    A holder stays for `holding_seconds` on average, and how long it has been there says nothing about how long it will.
    Those ahead become holders themselves, so their number stays; behind them, the places of `own` stay empty.

    >>> [round(seconds_until_released(ahead, own, 4, 12.0), 6) for ahead, own in ((0, 1), (2, 1), (0, 2))]
    [3.0, 9.0, 7.0]
    """
    if not holders:
        return 0.0
    gone = sum(1 / (holders - place) for place in range(min(own, holders)))
    return holding_seconds * (ahead / holders + gone)


def seconds_until_room(ahead: float, own: float, free: float, held: float, holders: int, keeping: float) -> float:
    """Return the expected time until `own` bytes are free after requests ahead have taken theirs.

    `held` bytes belong in equal parts to `holders`, each of which has them for `keeping` seconds on average.
    """
    if ahead + own <= free or not holders or held <= 0:
        return 0.0
    missing_ahead = max(0.0, ahead - free)
    missing_own = own - max(0.0, free - ahead)
    each = held / holders
    return seconds_until_released(ceil(missing_ahead / each), ceil(missing_own / each), holders, keeping)
