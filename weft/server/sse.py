"""Server-sent events, and the care for clients that go away: their requests end at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.server.errors import describe

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# Where in a request's scope the way to the socket lies, without the layers between.
DIRECT = "weft.send"
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


def error_event(error: Exception) -> bytes:
    """A stream that has begun can no longer change its status; the error is its last event."""
    return event(describe(error)[1])


async def gone(receive: Receive) -> None:
    """Returns when the client has hung up. To be called once its body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come; `close` is called in any case, at once if the client goes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        failed: Callable[[Exception], bytes] = error_event,
        done: bytes = DONE,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._failed = failed
        self._done = done
        self._disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.current_task()
        assert sender is not None

        async def watch() -> None:
            await gone(receive)
            self._disconnected = True
            self._close()
            sender.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            await self._send(send, scope.get(DIRECT, send))
        except asyncio.CancelledError:
            # Ours if the client has gone; somebody else's otherwise.
            if not self._disconnected or sender.uncancel() > 0:
                raise
        finally:
            watcher.cancel()
            self._close()

    async def _send(self, begin: Send, send: Send) -> None:
        await begin({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:  # the edge: whatever it is, the client is told
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        await send({"type": "http.response.body", "body": self._done})


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client goes away first, the work is cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        task.cancel()
