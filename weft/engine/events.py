"""What the engine tells its caller: a token or an end per sequence and step, and a report at any time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from weft.memory.misses import Miss

Top = list[tuple[int, float]]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class Output:
    """What one step brought for one sequence. Without a token it only finished."""

    sequence: int
    token: int | None
    logprob: float | None = None
    top: Top | None = None
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class PromptScore:
    """The log-probability of one prompt token, and the likeliest ones at its place."""

    logprob: float
    top: Top


@dataclass(slots=True)
class Report:
    """What became of a sequence, beside its tokens. `prompt_scores` begins behind position `prompt_logprobs_start`."""

    cached_tokens: int = 0
    miss: Miss | None = None
    preemptions: int = 0
    queued_seconds: float = 0.0  # before it first ran
    prompt_scores: list[PromptScore] = field(default_factory=list)
