"""Server-sent events. When a client disconnects, its requests end at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.server.errors import describe

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# A comment line, which clients of server-sent events skip.
KEEP_ALIVE = b": keep-alive\n\n"
# Key in a request's scope for the direct way to the socket, past the layers between.
DIRECT = "weft.send"
# How a stream can end other than by its answer.
DISCONNECT, ERROR = "disconnect", "error"
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


def error_event(error: Exception) -> bytes:
    """Return the event of an error: a stream that has begun can no longer change its status."""
    return event(describe(error)[1])


async def gone(receive: Receive) -> None:
    """Wait until the client has disconnected. Call it once the body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Silence:
    """Sends an event when a stream has been silent for this long, so that proxies do not close it; 0: never."""

    def __init__(
        self,
        seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        event: bytes = KEEP_ALIVE,
    ) -> None:
        self.event = event
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        # None while a send is in progress: a client that does not read must not be sent more.
        self._since: float | None = None

    def sending(self) -> None:
        self._since = None

    def sent(self) -> None:
        self._since = self._clock()

    async def fill(self, send: Send) -> None:
        """Send events until cancelled."""
        while self._seconds:
            silent = 0.0 if self._since is None else self._clock() - self._since
            if silent >= self._seconds:
                await send({"type": "http.response.body", "body": self.event, "more_body": True})
                silent = 0.0
            await self._sleep(self._seconds - silent)


class EventStream(Response):
    """Sends events as they arrive; always calls `close`, at once if the client disconnects.

    `ended` is called if the client disconnects or the events fail.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        failed: Callable[[Exception], bytes] = error_event,
        done: bytes = DONE,
        silence: Silence | None = None,
        ended: Callable[[str], None] = lambda how: None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self._close = close
        self._failed = failed
        self._done = done
        self._silence = silence or Silence()
        self._ended = ended
        self._disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.current_task()
        assert sender is not None

        async def watch() -> None:
            await gone(receive)
            self._disconnected = True
            self._ended(DISCONNECT)
            self._close()
            sender.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            await self._send(send, scope.get(DIRECT, send))
        except asyncio.CancelledError:
            # Our own cancellation if the client has disconnected; otherwise it came from outside.
            if not self._disconnected or sender.uncancel() > 0:
                raise
        finally:
            watcher.cancel()
            self._close()

    async def _send(self, begin: Send, send: Send) -> None:
        await begin({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            await self._send_events(send)
        except Exception as error:  # the outermost handler: the client gets every error as an event
            self._ended(ERROR)
            last = self._failed(error)
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": self._done})

    async def _send_events(self, send: Send) -> None:
        silence = self._silence
        silence.sent()
        filling = asyncio.ensure_future(silence.fill(send))
        try:
            async for chunk in self.events:
                silence.sending()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                silence.sent()
        finally:
            filling.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; cancel the work if the client disconnects first."""
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
