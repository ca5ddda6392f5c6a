"""What callers tell a running engine and what they hear from it, as plain values, between threads or processes.

Callers number their requests and questions themselves; every answer carries the number that it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weft.engine.events import Output, Report
from weft.engine.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Refuse:
    """A submission that could not even be read; the caller is told why."""

    number: int
    message: str


@dataclass(frozen=True, slots=True)
class End:
    """End a request: as if the model had `stopped`, or because nobody wants it any more."""

    number: int
    stopped: bool = False


class Topic(StrEnum):
    FLUSH = "flush"
    STATS = "stats"
    CACHE = "cache"
    PULSE = "pulse"  # nothing but a sign of life


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that is answered at the next border between steps."""

    number: int
    topic: Topic
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Step no more. Open requests get no answer: whoever says this has told their callers."""


Command = Submit | Refuse | End | Ask | Shutdown


@dataclass(frozen=True, slots=True)
class Refusal:
    number: int
    message: str
    status: int


@dataclass(slots=True)
class Replies:
    """Which requests were taken and which not, and answers to questions by their numbers."""

    accepted: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    answers: dict[int, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.accepted or self.refused or self.answers)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one step brought; `Output.sequence` is the caller's number. The last output of a request has a report."""

    outputs: list[Output]
    reports: dict[int, Report]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine steps no more; open requests stay unanswered. The message holds no internals."""

    message: str


Event = Replies | Outputs | Stopped
