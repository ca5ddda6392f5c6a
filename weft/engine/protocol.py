"""Commands to a running engine and its events, between threads or processes: one definition of each, with its bounds.

Callers number their requests and questions themselves; every event carries the number that it belongs to.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.base.errors import RequestError
from weft.base.tenants import TENANT_BYTES
from weft.engine.events import MAX_TOPS, Output, Report
from weft.engine.load import ReplicaLoad
from weft.engine.request import Request, RequestName
from weft.engine.tracing.events import TraceBatch
from weft.memory.journal import CacheChanges
from weft.memory.keys import KEY_BYTES
from weft.wire.messages import MAX_ROWS, MAX_WORDS, Message, MutableMessage, Number, Text

# Scores of a long prompt travel in pieces of this many tokens, so that reading one does not delay other streams.
SCORES_PER_PIECE = 1 << 10
# Numbers of one vector. Hidden states of published models have up to a quarter of this.
MAX_VECTOR = 1 << 16


class Submit(Message, tag="submit"):
    number: Number
    request: Request


class SavePrompt(Message, tag="save"):
    """A submission whose prompt is written to a new file. Only a front on the same machine may send it."""

    number: Number
    request: Request
    path: Text


class LoadPrompt(Message, tag="load"):
    """Load a prompt from a file, for requests with a salt; compute a share of it again. Only for such a front, too."""

    number: Number
    path: Text
    salt: Annotated[bytes, Meta(max_length=1024)] = b""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Refuse(Message):
    """A submission that could not be decoded; the reason is returned to the caller. It does not travel."""

    number: Number
    message: str
    field: str | None = None


class End(Message, tag="end"):
    """End a request: as if the model had `stopped`, or because it was aborted."""

    number: Number
    stopped: bool = False


class Topic(StrEnum):
    FLUSH = "flush"
    STATS = "stats"
    CACHE = "cache"
    REQUEST = "request"  # what is known of one that waits or runs, by its name
    PULSE = "pulse"  # only a heartbeat


class Question(Message, tag="ask"):
    """A question, answered at the next border between steps."""

    number: Number
    topic: Topic
    limit: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    name: RequestName = ""


class Drop(Message, tag="drop"):
    """Drop cached prefixes from all tiers: of a tenant, by its digest; those below a key; without either, all."""

    number: Number
    tenant: Annotated[bytes, Meta(max_length=TENANT_BYTES)] | None = None
    prefix: Annotated[bytes, Meta(max_length=KEY_BYTES)] | None = None


class Shutdown(Message, tag="shutdown"):
    """Stop stepping. Open requests get no answer: the sender has already failed them."""


class Subscribe(Message, tag="subscribe"):
    """Send `EngineNews` from now on, beginning with everything that is held, or, if not `wanted`, no longer."""

    wanted: bool = True


class WatchRequests(Message, tag="watch"):
    """Send `TraceBatch` from now on, beginning with what waits and runs, or, if not `wanted`, no longer."""

    wanted: bool = True


Command = Submit | SavePrompt | LoadPrompt | Refuse | End | Question | Drop | Subscribe | WatchRequests | Shutdown


class Refusal(Message):
    """The fields of a `RequestError`."""

    number: Number
    message: Text
    status: Annotated[int, Meta(ge=400, le=599)]
    field: Text | None = None

    @classmethod
    def of(cls, number: int, error: RequestError) -> Refusal:
        return cls(number, str(error)[:MAX_WORDS], error.status, error.field and error.field[:MAX_WORDS])


class Replies(MutableMessage, tag="replies"):
    """Which requests were accepted or refused, and answers to questions, by number."""

    accepted: Annotated[list[Number], Meta(max_length=MAX_ROWS)] = msgspec.field(default_factory=list)
    refused: Annotated[list[Refusal], Meta(max_length=MAX_ROWS)] = msgspec.field(default_factory=list)
    answers: Annotated[dict[Number, Any], Meta(max_length=MAX_ROWS)] = msgspec.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.accepted or self.refused or self.answers)


class ScoresPiece(Message, tag="scores"):
    """A piece of a request's prompt scores, before its last output: float32 and int32, `tops` per token."""

    number: Number
    tops: Annotated[int, Meta(ge=0, le=MAX_TOPS)]
    logprobs: Annotated[bytes, Meta(max_length=4 * SCORES_PER_PIECE)]
    top_tokens: Annotated[bytes, Meta(max_length=4 * SCORES_PER_PIECE * MAX_TOPS)]
    top_logprobs: Annotated[bytes, Meta(max_length=4 * SCORES_PER_PIECE * MAX_TOPS)]


class VectorPiece(Message, tag="vector"):
    """A request's vector, before its last output: float32."""

    number: Number
    values: Annotated[bytes, Meta(max_length=4 * MAX_VECTOR)]


class Outputs(Message, tag="outputs"):
    """Outputs of one step; `Output.sequence` is the caller's number. A request's last output has a report."""

    outputs: Annotated[list[Output], Meta(max_length=MAX_ROWS)]
    reports: Annotated[dict[Number, Report], Meta(max_length=MAX_ROWS)]


class Stopped(Message, tag="stopped"):
    """The engine has stopped; open requests stay unanswered. The message has no internal details."""

    message: Text


class RequestFailed(Message, tag="failed"):
    """One request will not be answered, because the engine behind the sender has stopped; others may be."""

    number: Number
    message: Text


class EngineNews(Message, tag="news"):
    """What changed in the cache, if anything did, and how busy the engine is."""

    changes: CacheChanges | None
    load: ReplicaLoad


Event = Replies | Outputs | RequestFailed | EngineNews | TraceBatch | Stopped
