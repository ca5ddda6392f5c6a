"""Answers the lines of one batch through the server's own routes, some at a time, and appends each to its journal."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from weft.base.errors import RequestError
from weft.server.access.auth import Tenant
from weft.server.access_log import Record
from weft.server.batches.journal import BatchAnswer, BatchError, BatchJournal, BatchProgress, BatchResponse
from weft.server.batches.lines import LinePlace, LineRequest, request_at
from weft.server.batches.room import LineRoom
from weft.server.http.errors import response
from weft.server.settings import Limits

log = logging.getLogger("weft.batches")

Call = Callable[[HttpRequest], Awaitable[Response]]
Sleep = Callable[[float], Awaitable[Any]]
# The server is full, a rate limit is reached, or the engine restarts: the line waits and is sent again.
WAIT = (429, 503)
MOST_TRIES = 100
MOST_WAIT_SECONDS = 60.0


class BatchJob:
    """One batch in the course of being answered. `calls` are the routes by path; `room` bounds sequences at work.

    It ends early when its journal has `most_bytes`, and when `allowed` says so: the tenant's key has been removed.
    """

    def __init__(
        self,
        source: Path,
        journal: BatchJournal,
        places: list[LinePlace],
        tenant: Tenant,
        calls: dict[str, Call],
        room: LineRoom,
        limits: Limits,
        most_bytes: float = math.inf,
        allowed: Callable[[], bool] = lambda: True,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.progress = BatchProgress(len(places))
        self._source = source
        self._journal = journal
        self._tenant = tenant
        self._calls = calls
        self._room = room
        self._limits = limits
        self._most_bytes = most_bytes
        self._allowed = allowed
        self._sleep = sleep
        done = set()
        for answer in journal.answers():
            done.add(answer.custom_id)
            self.progress.add(answer)
        self._left = [place for place in places if place.custom_id not in done]

    async def run(self) -> None:
        """Answer all lines that have no answer yet, in their order."""
        lines = iter(self._left)
        # Each takes the next line when it is free, so lines begin in order.
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._room.sequences, len(self._left))):
                group.create_task(self._work(lines))

    async def _work(self, lines: Iterator[LinePlace]) -> None:
        while not self.full and self._allowed() and (place := next(lines, None)) is not None:
            line = await asyncio.to_thread(request_at, self._source, place, self._limits)
            answer = await self._answered(line)
            self._journal.append(answer)
            self.progress.add(answer)

    @property
    def full(self) -> bool:
        return self._journal.size >= self._most_bytes

    @property
    def complete(self) -> bool:
        return self.progress.done == self.progress.total

    async def _answered(self, line: LineRequest) -> BatchAnswer:
        name = "batch_req_" + secrets.token_hex(12)
        # Once, however often it is sent. Limits of requests a minute are for interactive traffic.
        self._tenant.account.count_request()
        for tries in range(MOST_TRIES):
            # Not while it waits: the limits of one key would hold up the batches of all.
            async with self._room.taken(line.sequences):
                answer = await self._sent(line, name)
            if answer.status_code not in WAIT:
                break
            await self._sleep(min(MOST_WAIT_SECONDS, float(answer.headers.get("retry-after", 1)) * (1 + tries)))
        body = bytes(answer.body)
        if not body.startswith((b"{", b"[")):
            return BatchAnswer(name, line.custom_id, None, BatchError(None, "the route returned no JSON"))
        return BatchAnswer(name, line.custom_id, BatchResponse(answer.status_code, name, msgspec.Raw(body)))

    async def _sent(self, line: LineRequest, name: str) -> Response:
        """Return the response of a route, as a client of this tenant would get it."""
        most = self._room.most_of_line
        if line.sequences > most:
            message = f"opens {line.sequences} sequences at once; a line of a batch may open {most}: send several lines"
            return response(RequestError(message), line.url)
        body = [{"type": "http.request", "body": line.body}]
        never = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not body:
                # The client never leaves.
                await never.wait()
            return body.pop()

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": line.url,
            "query_string": b"",
            "headers": [(b"x-request-id", name.encode())],
            "client": None,
        }
        record = Record(scope, perf_counter())
        record.tenant = self._tenant
        scope["state"] = {"tenant": self._tenant, "record": record}
        try:
            return await self._calls[line.url](HttpRequest(scope, receive))
        except Exception as error:  # every line gets an answer, as every request does
            record.note(error)
            return response(error, line.url)
