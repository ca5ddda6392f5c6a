"""What is noted of requests and steps while a client watches. The fields are those of the JSON of `/debug/events`.

Every event names its request and its tenant, by its digest, so that a front can filter without remembering anything.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.base.tenants import TENANT_BYTES
from weft.engine.events import FinishReason, Report
from weft.engine.request import RequestName
from weft.memory.misses import Miss
from weft.wire.messages import Count, Message, Text

# Bounds of one batch; what is beyond them is counted as lost.
MOST_EVENTS = 8192
MOST_STEPS = 1024

Digest = Annotated[str, Meta(max_length=2 * TENANT_BYTES)]
# Of Unix time.
Milliseconds = float


class Wait(StrEnum):
    """Why a request does not start yet."""

    TURN = "turn"  # others are before it
    SEQUENCES = "sequences"  # all seats are taken
    MEMORY = "memory"
    LOAD = "load"  # of its prefix, from a tier below
    PREFIX = "prefix"  # a running request is about to compute more of its prefix
    GRAMMAR = "grammar"
    STEP = "step"  # the step has no room for its tokens


class RequestState(StrEnum):
    WAITS = "waits"
    COMPUTES = "computes"
    DECODES = "decodes"


class MissFacts(msgspec.Struct, frozen=True, gc=False):
    """Where a hit ended, and why. `at` is the first token that was not reused."""

    reason: Text
    why: Text
    at: Count
    matched: Count
    reusable: Count
    lost: Count

    @classmethod
    def of(cls, miss: Miss | None) -> MissFacts | None:
        if miss is None:
            return None
        return cls(miss.reason.value, miss.sentence, miss.cached, miss.kv_matched, miss.reusable, miss.tokens_lost)


class LoadedTokens(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that were loaded from the tiers below the device's memory."""

    host: Count = 0
    disk: Count = 0
    remote: Count = 0

    @classmethod
    def of(cls, report: Report) -> LoadedTokens:
        host = report.loaded_tokens - report.disk_tokens - report.remote_tokens
        return cls(host, report.disk_tokens, report.remote_tokens)


# Without cycles, so that many of them cost no garbage collection.
class TraceEvent(msgspec.Struct, frozen=True, gc=False, tag_field="event", tag=str.lower, forbid_unknown_fields=True):
    id: RequestName
    tenant: Digest
    at: Milliseconds


class Waits(TraceEvent, frozen=True, gc=False, rename={"why": "for"}):
    why: Wait
    prompt: Count


class Starts(TraceEvent, frozen=True, gc=False):
    """`again`: after a preemption. Then the other facts are those of the first start."""

    prompt: Count
    cached: Count
    loaded: LoadedTokens
    miss: MissFacts | None
    again: bool


class Computes(TraceEvent, frozen=True, gc=False, rename={"first": "from", "end": "to", "known": "of"}):
    """A chunk of a prompt was computed."""

    first: Count
    end: Count
    known: Count


class Decoded(TraceEvent, frozen=True, gc=False, tag="decodes"):
    """What a request has decoded in the last `ms`, over any number of steps."""

    ms: Milliseconds
    tokens: Count
    drafts: Count
    accepted: Count


class Preempted(TraceEvent, frozen=True, gc=False):
    pass


class Ends(TraceEvent, frozen=True, gc=False):
    reason: FinishReason
    tokens: Count


class Runs(TraceEvent, frozen=True, gc=False, rename={"why": "for"}):
    """All that is known of a request that waits or runs when it is asked for."""

    state: RequestState
    why: Wait | None
    prompt: Count
    cached: Count
    loaded: LoadedTokens
    miss: MissFacts | None
    computed: Count
    tokens: Count
    drafts: Count
    accepted: Count
    preemptions: Count


Event = Waits | Starts | Computes | Decoded | Preempted | Ends | Runs


class StepFacts(msgspec.Struct, frozen=True, gc=False):
    """A landed step: from the landing before it, or its launch into an idle device, to its own."""

    at: Milliseconds
    ms: Milliseconds
    rows: Count
    tokens: Count
    prompt_tokens: Count
    drafts: Count


class TraceBatch(Message, tag="trace"):
    """What was noted since the last batch. An `opening` one has everything that waits or runs at its source instead.

    A fleet names its members as sources. Of one that has `ended`, nothing more is heard until it opens again.
    """

    at: Milliseconds
    events: Annotated[list[Event], Meta(max_length=MOST_EVENTS)] = msgspec.field(default_factory=list)
    steps: Annotated[list[StepFacts], Meta(max_length=MOST_STEPS)] = msgspec.field(default_factory=list)
    lost: Count = 0
    opening: bool = False
    ended: bool = False
    source: Text = ""
