"""The outermost layer: gives every request an id, and logs one line when its response is complete.

Routes and inner layers record what they know in the request's `Record`; nothing here runs per token. A connection that
answers by itself, because it received no valid request or received it too late, reports that to `AccessLog.refused`.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.answers.followed import FollowedAnswer
from weft.base.logs import log_fields
from weft.engine.events import FinishReason
from weft.server.access.auth import Tenant
from weft.server.access.rates import Used
from weft.server.http.errors import GONE, is_anthropic
from weft.server.http.sse import DIRECT, DISCONNECT, ERROR
from weft.server.metrics.registry import OTHER, Metrics

log = logging.getLogger("weft.access")

REQUEST_ID = b"x-request-id"
# In a scope's state: the status that the client of a running request gets from its connection.
REFUSED = "refused"
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Computed(Protocol):
    """What the engine computed for a request: a `Generation`, or several. The first of the `names` is the answer's."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def model(self) -> str: ...

    @property
    def sequences(self) -> Sequence[FollowedAnswer]: ...

    def used(self) -> Used: ...

    @property
    def queued_seconds(self) -> float: ...

    @property
    def first_token_seconds(self) -> float | None: ...

    @property
    def finish(self) -> FinishReason | None: ...


class Record:
    """Facts about one request. `generation` has its tokens and times; `end` is why it ended, if that does not say."""

    __slots__ = ("client", "end", "generation", "id", "method", "path", "started", "status", "tenant")

    def __init__(self, scope: Scope, started: float) -> None:
        self.id = request_id(scope["headers"])
        self.started = started
        client = scope.get("client")
        self.client = client[0] if client else None
        self.method = scope["method"] if scope["method"] in METHODS else OTHER
        self.path: str = scope["path"]
        self.tenant: Tenant | None = None
        self.status: int | None = None
        self.generation: Computed | None = None
        self.end: str | None = None

    def ended(self, how: str) -> None:
        self.end = how

    def note(self, error: Exception) -> None:
        """Add the request's id to the traceback, in case the error is logged."""
        error.add_note(f"request {self.id}")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of every response, including errors and streams."""
        limits = [] if self.tenant is None else self.tenant.account.headers()
        names = (REQUEST_ID, b"request-id") if is_anthropic(self.path) else (REQUEST_ID,)
        return [*((name, self.id.encode()) for name in names), *limits]

    def fields(self, route: str, now: float) -> dict[str, Any]:
        """Return the fields of the log line. They contain no client text except an id of harmless characters."""
        found = {
            "id": self.id,
            "key": None if self.tenant is None else self.tenant.name,
            "client": self.client,
            "method": self.method,
            "route": route,
            "status": self.status,
        }
        found |= self._of_generation() if self.generation is not None else NO_GENERATION
        return found | {"total_ms": _milliseconds(now - self.started), "end": self._end()}

    def _of_generation(self) -> dict[str, Any]:
        assert self.generation is not None
        used, first = self.generation.used(), self.generation.first_token_seconds
        return {
            "tokens_in": used.prompt,
            "tokens_cached": used.cached,
            "tokens_out": used.generated,
            "queue_ms": _milliseconds(self.generation.queued_seconds),
            "first_token_ms": None if first is None else _milliseconds(first - self.started),
        }

    def _end(self) -> str | None:
        if self.end is None and self.status is not None and self.status >= 400:
            return DISCONNECT if self.status == GONE else ERROR
        finish = None if self.generation is None else self.generation.finish
        return self.end or (None if finish is None else str(finish))


NO_GENERATION = dict.fromkeys(("tokens_in", "tokens_cached", "tokens_out", "queue_ms", "first_token_ms"))


class EndedRequests(Protocol):
    """Takes every request once its response is complete."""

    def note(self, record: Record, route: str, headers: Sequence[tuple[bytes, bytes]]) -> None: ...


class AccessLog:
    """Wraps the whole application, so that no response leaves without an id and a count."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[Route],
        metrics: Metrics,
        logs: bool,
        clock: Callable[[], float] = perf_counter,
        spans: EndedRequests | None = None,
    ) -> None:
        self._app = app
        self._route = RouteNames(routes)
        self._metrics = metrics
        self._logs = logs
        self._clock = clock
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return another application with the same ids, counts and log around it."""
        return partial(self._answer, app)

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(scope, self._clock())
        state = scope.setdefault("state", {})
        state["record"] = record

        async def begin(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(record, state.get(REFUSED, message["status"]))
                message = {**message, "headers": [*message["headers"], *record.headers()]}
            await send(message)

        # Streams of thousands of tokens per second send directly, past all layers that saw them begin.
        scope[DIRECT] = send
        try:
            await app(scope, receive, begin)
        finally:
            if record.status is None and REFUSED in state:
                self._count(record, state[REFUSED])
            self._log(record, scope)

    def refused(self, scope: Scope, status: int, seconds: float) -> list[tuple[bytes, bytes]]:
        """Count and log a connection's own answer after this time; return the headers that it must carry.

        A request that the application was called for keeps its id, and its only line.
        """
        record: Record | None = scope["state"].get("record")
        if record is None:
            record = Record(scope, self._clock() - seconds)
            self._count(record, status)
            self._log(record, scope)
        return record.headers()

    def _count(self, record: Record, status: int) -> None:
        record.status = status
        self._metrics.answered(record.method, self._route(record.path), status)

    def _log(self, record: Record, scope: Scope) -> None:
        if self._logs:
            log_fields(log, "request", record.fields(self._route(record.path), self._clock()))
        if self._spans is not None:
            self._spans.note(record, self._route(record.path), scope["headers"])


class RouteNames:
    """Finds the route pattern of a path. Client text never becomes a name."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._plain = frozenset(route.path for route in routes)
        self._patterns = [
            (route.path_regex, re.sub(r":\w+}", "}", route.path)) for route in routes if "{" in route.path
        ]

    def __call__(self, path: str) -> str:
        if path in self._plain:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), OTHER)


def request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the client's own id if it is short and harmless, otherwise a new one.

    >>> request_id([(b"x-request-id", b"job-7")]), len(request_id([(b"x-request-id", b"a b")]))
    ('job-7', 32)
    """
    for name, value in headers:
        if name == REQUEST_ID and _WELL_FORMED.fullmatch(value):
            return value.decode()
    return secrets.token_hex(16)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)
