"""Gives what an engine notes of its requests to the clients that watch. Without any, the engine notes nothing.

Each listener has a bounded buffer. One that does not read loses events, learns how many of its own, and begins anew
with what runs. A tenant sees its own requests only, and no steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from weft.backends.backend import Backend
from weft.base.errors import RequestError
from weft.engine.tracing.events import TraceBatch
from weft.server.http.sse import event

MOST_LISTENERS = 16
MOST_OF_TENANT = 4
# Of events and steps that wait for a listener.
MOST_WAITING = 1 << 15
# Least time between two messages to a listener.
PAUSE_SECONDS = 0.1


class TraceHub:
    def __init__(
        self,
        backend: Backend,
        most: int = MOST_LISTENERS,
        most_of_tenant: int = MOST_OF_TENANT,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._backend = backend
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._sleep = sleep
        self.listeners: list[TraceListener] = []

    def listen(self, digest: str, admin: bool) -> TraceListener:
        """Return a listener for a tenant, by its digest; the admin's hears of all tenants. Always close it."""
        own = sum(each.digest == digest for each in self.listeners)
        if own >= self._most_of_tenant or len(self.listeners) >= self._most:
            raise RequestError("as many clients look at requests as the server allows; try again later", 429)
        listener = TraceListener(digest, admin, self._close, self._open, self._sleep)
        self.listeners.append(listener)
        self._open()
        return listener

    def _open(self) -> None:
        self._backend.watch(self._hear)

    def _close(self, listener: TraceListener) -> None:
        if listener in self.listeners:
            self.listeners.remove(listener)
        if not self.listeners:
            self._backend.unwatch(self._hear)

    def _hear(self, batch: TraceBatch | None) -> None:
        for listener in list(self.listeners):
            if batch is None:
                listener.end()
            else:
                listener.take(batch)


class TraceListener:
    """One client: `batches` yields what it may see, as server-sent events."""

    def __init__(
        self,
        digest: str,
        admin: bool,
        closed: Callable[[TraceListener], None],
        begin_anew: Callable[[], None],
        sleep: Callable[[float], Awaitable[Any]],
    ) -> None:
        self.digest = digest
        self._admin = admin
        self._closed = closed
        self._begin_anew = begin_anew
        self._sleep = sleep
        # Sources whose batches follow one with all that ran.
        self._opened: set[str] = set()
        self._waiting: list[TraceBatch] = []
        self._size = 0
        self._lost = 0
        self._arrived = asyncio.Event()
        self._ended = False

    def take(self, batch: TraceBatch) -> None:
        """Keep what the client may see of a batch until it is sent."""
        found = batch if self._admin else visible(batch, self.digest)
        size = len(found.events) + len(found.steps)
        if not self._follows(batch):
            # After a loss, all is lost until what runs is sent again.
            self._lost += size if self._lost and not batch.opening else 0
            return
        if not (size or found.opening or found.ended or found.lost):
            return
        if self._size + size > MOST_WAITING:
            self._lost += size + found.lost
            self._opened.clear()
        else:
            self._waiting.append(found)
            self._size += size
        self._arrived.set()

    def _follows(self, batch: TraceBatch) -> bool:
        """Return whether a batch goes on with what this client knows. What another one asked for does not."""
        known = batch.source in self._opened
        if batch.ended:
            self._opened.discard(batch.source)
        elif batch.opening:
            self._opened.add(batch.source)
            return not known
        return known

    def end(self) -> None:
        """End the stream once it has sent what waits: the engine has ended."""
        self._ended = True
        self._arrived.set()

    def close(self) -> None:
        self._waiting.clear()
        self.end()
        self._closed(self)

    async def batches(self) -> AsyncIterator[bytes]:
        """Yield what has arrived, at a bounded rate, until the engine ends."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            waiting, lost = self._waiting, self._lost
            self._waiting, self._size, self._lost = [], 0, 0
            for place, batch in enumerate(waiting):
                yield event(as_json(batch, self._admin, lost if place == len(waiting) - 1 else 0))
            if lost:
                self._begin_anew()
            if self._ended and not self._waiting:
                return
            await self._sleep(PAUSE_SECONDS)


def visible(batch: TraceBatch, digest: str) -> TraceBatch:
    """Return the part of a batch that a tenant may see: nothing that depends on the requests of others."""
    own = [each for each in batch.events if each.tenant == digest]
    return TraceBatch(batch.at, own, opening=batch.opening, ended=batch.ended, source=batch.source)


def as_json(batch: TraceBatch, admin: bool, lost: int) -> dict[str, Any]:
    """Return the content of a server-sent event. Only the admin's has steps."""
    found: dict[str, Any] = {"at": batch.at, "events": batch.events, "lost": batch.lost + lost}
    if batch.opening or batch.ended:
        found["opening"] = True
    if batch.source:
        found["source"] = batch.source
    return found | {"steps": batch.steps} if admin else found
