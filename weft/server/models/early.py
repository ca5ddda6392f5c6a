"""Begins a stream before its model is loaded, so that neither the client nor a proxy gives up.

Once the first comment is sent, the status is 200: what goes wrong later is an event of the stream, as it is for every
stream that has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from weft.server.access_log import Record
from weft.server.apis.delivery import LINES
from weft.server.apis.ollama.answers import as_line, heading
from weft.server.http.errors import is_anthropic, is_ollama, shaper_of
from weft.server.http.sse import DIRECT, DISCONNECT, DONE, ERROR, EVENTS, KEEP_ALIVE, WRITE, event, gone, named_event

HEADERS = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How the streams of an API look: a sign of life, and what is sent instead of an answer."""

    media_type: str
    keep_alive: bytes
    failed: Callable[[Exception], bytes]
    done: bytes


def form_of(path: str, model: str) -> StreamForm:
    shape = shaper_of(path)
    if is_ollama(path):
        empty = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
        line = as_line(heading(model) | empty | {"done": False})
        return StreamForm(LINES, line, lambda error: as_line(shape(error)[1]), b"")
    if is_anthropic(path):
        return StreamForm(EVENTS, KEEP_ALIVE, lambda error: named_event("error", shape(error)[1]), b"")
    if path == "/v1/responses":
        return StreamForm(EVENTS, KEEP_ALIVE, lambda error: named_event("error", failed_response(shape, error)), b"")
    return StreamForm(EVENTS, KEEP_ALIVE, lambda error: event(shape(error)[1]), DONE)


def failed_response(shape: Callable[[Exception], tuple[int, Any]], error: Exception) -> dict[str, Any]:
    """Return the error event of the Responses API."""
    body = shape(error)[1].error
    return {"type": "error", "code": body.code or body.type, "message": body.message, "param": body.param}


class EarlyStream:
    """Sends comments until `answer` has returned, then its stream. `release` is called at the end in any case.

    This alone listens to the client: `answer` gets what to receive from instead.
    """

    def __init__(
        self,
        answer: Callable[[Receive], Coroutine[Any, Any, Response]],
        release: Callable[[], None],
        form: StreamForm,
        seconds: float,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._answer = answer
        self._release = release
        self._form = form
        self._seconds = seconds
        self._sleep = sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["state"]["record"]
        leaving = asyncio.ensure_future(gone(receive))

        async def left() -> Message:
            await asyncio.shield(leaving)
            return {"type": "http.disconnect"}

        answer = asyncio.ensure_future(self._answer(left))
        try:
            headers = [(b"content-type", f"{self._form.media_type}; charset=utf-8".encode()), *HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._keep_alive(answer, leaving, send)
            if not answer.done():
                record.ended(DISCONNECT)
                return
            await self._go_on(answer, record, scope, left, send)
        finally:
            leaving.cancel()
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            self._release()

    async def _keep_alive(self, answer: asyncio.Future[Response], leaving: asyncio.Future[None], send: Send) -> None:
        """Send signs of life until the answer begins, or the client has left."""
        while not answer.done() and not leaving.done():
            await send({"type": "http.response.body", "body": self._form.keep_alive, "more_body": True})
            pause: asyncio.Future[Any] = asyncio.ensure_future(self._sleep(self._seconds))
            first: set[asyncio.Future[Any]] = {answer, leaving, pause}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            pause.cancel()

    async def _go_on(
        self, answer: asyncio.Future[Response], record: Record, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the answer's own events, or why there are none."""
        try:
            response = answer.result()
        except Exception as error:  # the client gets every error as an event
            record.note(error)
            record.ended(ERROR)
            await send({"type": "http.response.body", "body": self._form.failed(error), "more_body": True})
            await send({"type": "http.response.body", "body": self._form.done})
            return

        async def continued(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        plain = {key: value for key, value in scope.items() if key not in (DIRECT, WRITE)}
        await response(plain, receive, continued)
