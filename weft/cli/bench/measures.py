"""Computes the usual metrics from request times. Pure; knows no server.

Definitions follow other benchmarks: TTFT runs from sending a request to the first chunk with a token; ITL is the time
between chunks; TPOT is the time after the first token divided by the tokens after it; E2E runs from sending to the last
chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any


@dataclass(slots=True)
class MeasuredRequest:
    """One request: when it was sent, when its chunks arrived (seconds), what the server counted, or why it failed."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int | None = None  # not every server reports it
    draft_steps: int = 0  # steps that verified drafts
    accepted_drafts: int = 0
    text: str = ""
    error: str | None = None

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def first(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.chunks, self.chunks[1:])]


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly between neighbours.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([5.0], 0.99)
    (2.5, 5.0)
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(measured: Sequence[MeasuredRequest], duration: float) -> dict[str, Any]:
    """Return all metrics, named as in the result files of other benchmarks so that their tools can read them."""
    good = [each for each in measured if each.error is None]
    prompt, tokens = sum(each.prompt_tokens for each in good), sum(each.tokens for each in good)
    told = [each for each in good if each.cached_tokens is not None]
    cached = sum(each.cached_tokens or 0 for each in told)
    asked = sum(each.prompt_tokens for each in told)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(measured) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": tokens,
        "request_throughput": len(good) / duration,
        "input_throughput": prompt / duration,
        "output_throughput": tokens / duration,
        "total_token_throughput": (prompt + tokens) / duration,
        "cached_tokens": cached if told else None,
        "cached_share": cached / asked if asked else None,
        "accepted_length": _accepted_length(good),
    }
    times = {
        "ttft": [each.first for each in good if each.chunks],
        "tpot": [(each.ended - each.chunks[0]) / (each.tokens - 1) for each in good if each.chunks and each.tokens > 1],
        "itl": [gap for each in good for gap in each.gaps],
        "e2el": [each.latency for each in good],
    }
    for name, values in times.items():
        found |= _spread(name, [1000 * value for value in values])
    found["errors"] = dict(Counter(each.error for each in measured if each.error is not None))
    return found


def _accepted_length(measured: Sequence[MeasuredRequest]) -> float | None:
    """Return the mean tokens of a step with drafts, the free one included."""
    steps = sum(each.draft_steps for each in measured)
    return 1 + sum(each.accepted_drafts for each in measured) / steps if steps else None


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    if not values:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "p99")}
    return {
        f"mean_{name}_ms": fmean(values),
        f"median_{name}_ms": median(values),
        f"p99_{name}_ms": quantile(values, 0.99),
    }


ROWS = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Cached input tokens", "cached_tokens", "d"),
    ("Cached share of input", "cached_share", ".1%"),
    ("Accepted length with drafts", "accepted_length", ".2f"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Input token throughput (tok/s)", "input_throughput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
)
TIMES = (
    ("Time to first token", "TTFT", "ttft"),
    ("Time per output token, without the first", "TPOT", "tpot"),
    ("Inter-token latency", "ITL", "itl"),
    ("End-to-end latency", "E2E", "e2el"),
)


def report(found: dict[str, Any]) -> str:
    """Return the metrics as a table for people."""
    lines = [_row(label, found[name], form) for label, name, form in ROWS]
    for title, short, name in TIMES:
        lines.append(f"-- {title}")
        for kind in ("mean", "median", "p99"):
            lines.append(_row(f"{kind.capitalize()} {short} (ms)", found[f"{kind}_{name}_ms"], ".2f"))
    lines += [f"failed {count} times: {error}" for error, count in found["errors"].items()]
    return "\n".join(lines)


def _row(label: str, value: float | None, form: str) -> str:
    return f"{label + ':':<36}{'n/a' if value is None else format(value, form):>14}"
