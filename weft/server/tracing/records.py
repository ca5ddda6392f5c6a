"""What became of the last requests: facts of each, noted once when it ends. Nothing is noted for a token or a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec

from weft.backends.backend import Backend
from weft.base.errors import EngineStopped, RequestError
from weft.base.tenants import tenant_digest
from weft.engine.events import FinishReason
from weft.engine.tracing.events import LoadedTokens, MissFacts
from weft.server.access.auth import Tenant
from weft.server.generation import Generation, OpenSequence

MOST_REQUESTS = 1024
# Of one request; further answers are left out.
MOST_ANSWERS = 32
UNKNOWN = "there is no such request, or it ended too long ago"


class AnswerRecord(msgspec.Struct, frozen=True):
    """What is known of one answer. Times in milliseconds are from the start of its request. None: not known yet."""

    id: str
    prompt: int
    tokens: int
    cached: int = 0
    loaded: LoadedTokens = LoadedTokens()
    miss: MissFacts | None = None
    computed: int = 0
    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0
    queued_ms: float | None = None
    loading_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None
    finish: FinishReason | None = None


class RequestRecord(msgspec.Struct, frozen=True):
    """`id` is that of the answer, `request` the one in the log and in the header X-Request-Id."""

    id: str
    request: str | None
    tenant: str
    state: str
    started: float
    answers: list[AnswerRecord]


class RequestRecords:
    """`running` are the generations that have not ended."""

    def __init__(self, backend: Backend, running: Collection[Generation]) -> None:
        self._backend = backend
        self._running = running
        self._ended: deque[tuple[tuple[str, ...], RequestRecord]] = deque(maxlen=MOST_REQUESTS)

    def note(self, generation: Generation) -> None:
        """Keep the record of a generation that has ended."""
        if generation.open:
            self._ended.append((generation.names, record_of(generation, "ended")))

    async def find(self, name: str, tenant: Tenant) -> RequestRecord:
        """Return the record of a tenant's own request, or of anyone's for the admin, by one of its names."""
        for generation in self._running:
            if name in (*generation.names, generation.request_id) and (tenant.admin or generation.tenant == tenant):
                return await self._with_state(record_of(generation, "running"))
        digest = digest_of(tenant)
        for names, record in reversed(self._ended):
            if name in (*names, record.request) and (tenant.admin or record.tenant == digest):
                return record
        raise RequestError(UNKNOWN, 404)

    async def _with_state(self, record: RequestRecord) -> RequestRecord:
        """Add what only the engine knows of a request that runs."""
        try:
            found = await self._backend.request_facts(record.id)
        except (EngineStopped, RequestError):
            return record
        known = {facts["id"]: facts for facts in found if facts["tenant"] == record.tenant}
        answers = [with_facts(each, known.get(each.id)) for each in record.answers]
        return msgspec.structs.replace(record, answers=answers)


SHOWN = ("cached", "computed", "tokens", "drafts", "accepted", "preemptions")


def with_facts(answer: AnswerRecord, facts: dict[str, Any] | None) -> AnswerRecord:
    if facts is None or answer.finish is not None:
        return answer
    loaded, miss = msgspec.convert(facts["loaded"], LoadedTokens), msgspec.convert(facts["miss"], MissFacts | None)
    return msgspec.structs.replace(answer, loaded=loaded, miss=miss, **{name: facts[name] for name in SHOWN})


def record_of(generation: Generation, state: str) -> RequestRecord:
    answers = [answer_of(each, generation) for each in generation.open[:MOST_ANSWERS]]
    name, tenant = generation.names[0], digest_of(generation.tenant)
    return RequestRecord(name, generation.request_id, tenant, state, 1000 * generation.started_at, answers)


def answer_of(sequence: OpenSequence, generation: Generation) -> AnswerRecord:
    followed, meter = sequence.followed, sequence.meter
    request, report = followed.request, followed.report
    ended = meter.ended_seconds is not None
    facts = AnswerRecord(
        request.name,
        request.known_length,
        followed.generated,
        first_token_ms=since(generation, meter.first_token_seconds),
    )
    if not ended:
        return facts
    return msgspec.structs.replace(
        facts,
        cached=report.cached_tokens,
        loaded=LoadedTokens.of(report),
        miss=MissFacts.of(report.miss),
        computed=request.known_length - report.cached_tokens,
        drafts=report.drafts.proposed,
        accepted=report.drafts.accepted,
        preemptions=report.preemptions,
        queued_ms=rounded(report.queued_seconds),
        loading_ms=rounded(report.loading_seconds),
        total_ms=since(generation, meter.ended_seconds),
        finish=followed.finish or FinishReason.ABORT,
    )


def since(generation: Generation, time: float | None) -> float | None:
    return None if time is None else rounded(time - generation.started)


def rounded(seconds: float) -> float:
    return round(1000 * seconds, 2)


def digest_of(tenant: Tenant) -> str:
    """Return what names a tenant in reports, which does not reveal its key."""
    return tenant_digest(tenant.salt).hex()
