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

from weft.server.http.errors import describe

T = TypeVar("T")
Write = Callable[[bytes], bool]

EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"
# A comment line, which clients of server-sent events skip.
KEEP_ALIVE = b": keep-alive\n\n"
# Keys in a request's scope for the direct way to the socket, past the layers between: ASGI's `send`, and a function
# that writes a part of the body at once if the client reads, and otherwise returns False.
DIRECT, WRITE = "weft.send", "weft.write"
# How a stream can end other than by its answer.
DISCONNECT, ERROR = "disconnect", "error"
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


class TextEvents:
    """Events that differ in one text only, which costs less than to encode each as a whole.

    `value(text)` is an event's content with this text in it.

    >>> TextEvents(lambda text: {"id": 5, "text": text}).event('"hi"')
    b'data: {"id":5,"text":"\\\\"hi\\\\""}\\n\\n'
    """

    __slots__ = ("_after", "_before")

    # A text that no other field of an event holds: control characters are not accepted in names.
    MARK = "\x00\x01"

    def __init__(self, value: Callable[[str], Any]) -> None:
        self._before, self._after = event(value(self.MARK)).split(_encode(self.MARK))

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


def error_event(error: Exception) -> bytes:
    """Return the event of an error: a stream that has begun can no longer change its status."""
    return event(describe(error)[1])


def _no_write(chunk: bytes) -> bool:
    return False


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
        self._sleep = sleep
        self.clock = clock
        # When the last event was sent; None while one is being sent: a client that does not read must not be sent more.
        self.since: float | None = None

    async def fill(self, send: Send) -> None:
        """Send events until cancelled."""
        while self._seconds:
            silent = 0.0 if self.since is None else self.clock() - self.since
            if silent >= self._seconds:
                await send({"type": "http.response.body", "body": self.event, "more_body": True})
                silent = 0.0
            await self._sleep(self._seconds - silent)


class EventStream(Response):
    """Sends events as they arrive; always calls `close`, at once if the client disconnects.

    `ended` is called if the client disconnects or the events fail.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        failed: Callable[[Exception], bytes] = error_event,
        done: bytes = DONE,
        silence: Silence | None = None,
        ended: Callable[[str], None] = lambda how: None,
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self.events = events
        self._close = close
        self._failed = failed
        self._done = done
        self._silence = silence or Silence()
        self._ended = ended
        self._disconnected = False
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own: each event would otherwise resume all layers that this is called through.
        sender = asyncio.ensure_future(self._send(send, scope.get(DIRECT, send), scope.get(WRITE, _no_write)))

        async def watch() -> None:
            await gone(receive)
            if self._complete:
                # After the last event, a connection counts as closed.
                return
            self._disconnected = True
            self._ended(DISCONNECT)
            self._close()
            sender.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            await sender
        except asyncio.CancelledError:
            # The sender's cancellation if the client has disconnected; otherwise it came from outside.
            task = asyncio.current_task()
            if not self._disconnected or (task is not None and task.cancelling()):
                raise
        finally:
            watcher.cancel()
            sender.cancel()
            self._close()

    async def _send(self, begin: Send, send: Send, write: Write) -> None:
        await begin({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            await self._send_events(send, write)
        except Exception as error:  # the outermost handler: the client gets every error as an event
            self._ended(ERROR)
            last = self._failed(error)
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": self._done})
        self._complete = True

    async def _send_events(self, send: Send, write: Write) -> None:
        silence = self._silence
        clock = silence.clock
        silence.since = clock()
        filling = asyncio.ensure_future(silence.fill(send))
        try:
            async for chunk in self.events:
                if not write(chunk):
                    silence.since = None
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                silence.since = clock()
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
