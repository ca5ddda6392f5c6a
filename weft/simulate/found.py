"""Results of a run, as values: of one engine, or added up over a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Refusals:
    """Requests that exceed a bound even when alone. `bound` and `most` are tokens or bytes."""

    bound: int
    requests: int = 0
    tokens: int = 0  # prompt and answer of the longest
    most: int = 0  # what that one needs

    def add(self, tokens: int, needed: int) -> None:
        self.requests += 1
        if tokens > self.tokens:
            self.tokens, self.most = tokens, needed


@dataclass(slots=True)
class Found:
    """Results of a run. Lists are per request in the order of their ends, `course` is over time."""

    too_long: Refusals  # for `max_length`
    too_large: Refusals  # for memory
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    hit_tokens: int = 0
    oracle_tokens: int | None = None
    distinct_cells: int | None = None
    seconds: float = 0.0
    busy_seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    course: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    replicas: list[Found] = field(default_factory=list)  # of a fleet

    @property
    def refused(self) -> int:
        return self.too_long.requests + self.too_large.requests

    @property
    def imbalance(self) -> float:
        """How much longer the busiest replica of a fleet computed than the average one: 1.0 is perfect balance."""
        busy = [each.busy_seconds for each in self.replicas] or [self.busy_seconds]
        return max(busy) * len(busy) / max(sum(busy), 1e-9)

    def first_token(self, share: float) -> float:
        """Return the time to first token in seconds that this share of the requests stayed below."""
        return float(np.quantile(self.first_token_seconds, share)) if self.first_token_seconds else 0.0


def together(replicas: list[Found]) -> Found:
    """Return the results of a fleet: sums over its replicas, with their requests in the order of the replicas."""
    bounds = Refusals(replicas[0].too_long.bound), Refusals(replicas[0].too_large.bound)
    total = Found(*bounds, replicas=replicas)
    for each in replicas:
        for name in ("requests", "failed", "prompt_tokens", "answer_tokens", "hit_tokens", "busy_seconds"):
            setattr(total, name, getattr(total, name) + getattr(each, name))
        for sums, part in ((total.too_long, each.too_long), (total.too_large, each.too_large)):
            sums.requests += part.requests
            if part.tokens > sums.tokens:
                sums.tokens, sums.most = part.tokens, part.most
        total.seconds = max(total.seconds, each.seconds)
        total.first_token_seconds += each.first_token_seconds
        total.stats = _added(total.stats, each.stats)
    total.course = _course_of_all([each.course for each in replicas])
    return total


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return nested counters, added up. Other values are those of the first replica."""
    found = dict(other) | one
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict):
            found[name] = _added(one[name], other[name])
        elif isinstance(one[name], int | float):
            found[name] = one[name] + other[name]
    return found


def _course_of_all(courses: list[list[tuple[float, dict[str, int]]]]) -> list[tuple[float, dict[str, int]]]:
    """Return the sums of samples that were taken at different times."""
    changes = [(seconds, place, used) for place, each in enumerate(courses) for seconds, used in each]
    last: dict[int, dict[str, int]] = {}
    course = []
    for seconds, place, used in sorted(changes, key=lambda change: change[:2]):
        last[place] = used
        course.append((seconds, {kind: sum(each[kind] for each in last.values()) for kind in used}))
    return course[:: max(1, len(courses))]
