"""Commands to a running engine and its events, as plain values, between threads or processes.

Callers number their requests and questions themselves; every event carries the number that it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weft.engine.events import Output, Report
from weft.engine.load import ReplicaLoad
from weft.engine.request import Request
from weft.memory.journal import CacheChanges


@dataclass(frozen=True, slots=True)
class Submit:
    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Refuse:
    """A submission that could not be decoded; the reason is returned to the caller."""

    number: int
    message: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """End a request: as if the model had `stopped`, or because it was aborted."""

    number: int
    stopped: bool = False


class Topic(StrEnum):
    FLUSH = "flush"
    STATS = "stats"
    CACHE = "cache"
    PULSE = "pulse"  # only a heartbeat


@dataclass(frozen=True, slots=True)
class Question:
    """A question, answered at the next border between steps."""

    number: int
    topic: Topic
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Stop stepping. Open requests get no answer: the sender has already failed them."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Send `EngineNews` from now on, beginning with everything that is held, or, if not `wanted`, no longer."""

    wanted: bool = True


Command = Submit | Refuse | End | Question | Subscribe | Shutdown


@dataclass(frozen=True, slots=True)
class Refusal:
    """The fields of a `RequestError`."""

    number: int
    message: str
    status: int
    field: str | None = None


@dataclass(slots=True)
class Replies:
    """Which requests were accepted or refused, and answers to questions, by number."""

    accepted: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    answers: dict[int, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.accepted or self.refused or self.answers)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of one step; `Output.sequence` is the caller's number. A request's last output has a report."""

    outputs: list[Output]
    reports: dict[int, Report]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine has stopped; open requests stay unanswered. The message has no internal details."""

    message: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """One request will not be answered, because the engine behind the sender has stopped; others may be."""

    number: int
    message: str


@dataclass(frozen=True, slots=True)
class EngineNews:
    """What changed in the cache, if anything did, and how busy the engine is."""

    changes: CacheChanges | None
    load: ReplicaLoad


Event = Replies | Outputs | RequestFailed | EngineNews | Stopped
