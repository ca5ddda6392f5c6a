"""One request and its response on an HTTP connection: the application's `receive` and `send`, and the framing.

The connection (`http.py`) does the rest: parsing, deadlines, the order of responses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from weft.server.http.errors import INTERNAL, answer, json_response
from weft.server.http.reader import Header
from weft.server.http.sse import KEEP_ALIVE, WRITE

log = logging.getLogger("weft")

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Statuses whose responses have no body, whatever their headers say.
BODILESS = (204, 304)
PHRASES = {status.value: status.phrase for status in HTTPStatus}


def status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {PHRASES.get(status, '')}\r\n".encode()


class Wire(Protocol):
    """What an exchange needs from its connection."""

    write_paused: bool

    @property
    def default_headers(self) -> list[Header]:
        """Headers of every response."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes to the client, or buffer them until it reads."""

    async def writable(self) -> None:
        """Wait while the client has too much unread output."""

    def body_taken(self) -> None:
        """Note that the application has read the available body."""

    def answered(self) -> None:
        """Note that the response is complete."""

    def abandoned(self, answer_begun: bool) -> None:
        """Note that the response will not be completed."""


class HttpExchange:
    """An ASGI request whose body the connection feeds. `gone`: its client left, or its body will never be complete."""

    def __init__(self, wire: Wire, scope: Scope, app: ASGIApp, keep_alive: bool, expects_continue: bool) -> None:
        self.scope = scope
        self.app = app
        self.keep_alive = keep_alive
        self.gone = False
        self.answered = False
        self.body = bytearray()
        self._wire = wire
        self._expects_continue = expects_continue
        self._body_complete = False
        self._body_delivered = False
        self._changed = asyncio.Event()
        self._answer_begun = False
        self._chunked = False
        self._is_event_stream = False
        self._bodiless = False
        self._remaining_bytes: int | None = None
        scope[WRITE] = self.write_now

    async def run(self) -> None:
        """Call the application; if it does not respond, respond for it or abandon the exchange."""
        try:
            await self.app(self.scope, self.receive, self.send)
            if not self.gone and not self.answered:
                log.error("the application did not complete its response to %.200r", self.scope["path"])
        except Exception:
            log.exception("the application failed")
        finally:
            if not self.gone and not self._answer_begun:
                self._answer_failure()
            elif not self.answered:
                self._wire.abandoned(self._answer_begun)

    # the connection's side --------------------------------------------------------------------------------------------

    def feed(self, body: bytes) -> None:
        self.body += body
        self._changed.set()

    def end_body(self) -> None:
        self._body_complete = True
        self._changed.set()

    def leave(self) -> None:
        """Notify the application that the client has gone, or that its request will never be complete."""
        self.gone = True
        self.body = bytearray()
        self._changed.set()

    @property
    def can_probe(self) -> bool:
        """Whether the client can be sent bytes that it ignores: before its response, or in a stream of events."""
        if self._answer_begun:
            return self._is_event_stream
        return bool(self.scope["http_version"] == "1.1")

    def probe(self) -> None:
        """Send bytes that the client ignores. Its machine refuses them if it has left."""
        if self.gone or self.answered or self._wire.write_paused or not self.can_probe:
            return
        if self._answer_begun:
            self._wire.write(self._part(KEEP_ALIVE))
        else:
            self._wire.write(CONTINUE)

    # the application's side -------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        if self._expects_continue and not self._answer_begun:
            self._expects_continue = False
            if not self.body and not self._body_complete and not self.gone:
                self._wire.write(CONTINUE)
        while not self._something_to_receive:
            self._changed.clear()
            await self._changed.wait()
        if self.gone or self.answered:
            return {"type": "http.disconnect"}
        part, self.body = bytes(self.body), bytearray()
        self._body_delivered = self._body_complete
        self._wire.body_taken()
        return {"type": "http.request", "body": part, "more_body": not self._body_complete}

    @property
    def _something_to_receive(self) -> bool:
        if self.gone or self.answered:
            return True
        return not self._body_delivered and bool(self.body or self._body_complete)

    async def send(self, message: Message) -> None:
        if self._wire.write_paused:
            await self._wire.writable()
        if self.gone:
            return
        if not self._answer_begun:
            self._begin(message["status"], message.get("headers", ()))
        else:
            self._continue(message.get("body", b""), message.get("more_body", False))

    def write_now(self, body: bytes) -> bool:
        """Send a part of a streamed body if that is possible without waiting; return whether it was."""
        if self._wire.write_paused or self.gone or self.answered or not self._chunked or not body:
            return False
        self._wire.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    # framing ----------------------------------------------------------------------------------------------------------

    def _begin(self, status: int, headers: Iterable[Header]) -> None:
        lines = [status_line(status)]
        # A client that was never asked to continue may send or omit its body, so what follows is ambiguous.
        self.keep_alive = self.keep_alive and not self._expects_continue
        for name, value in (*self._wire.default_headers, *headers):
            if b"\n" in value or b"\r" in value:
                raise ValueError(f"response header {name!r} must be one line, got {value!r}")
            if name == b"connection":
                self.keep_alive = self.keep_alive and value != b"close"
                continue
            if name == b"content-length":
                self._remaining_bytes = int(value)
            if name == b"content-type":
                self._is_event_stream = value.startswith(b"text/event-stream")
            lines.append(name + b": " + value + b"\r\n")
        self._bodiless = self.scope["method"] == "HEAD" or status in BODILESS
        if self._remaining_bytes is None and not self._bodiless:
            # HTTP/1.0 has no chunks: the end of the connection is the end of the response.
            self._chunked = self.scope["http_version"] == "1.1"
            self.keep_alive = self.keep_alive and self._chunked
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self._answer_begun = True
        self._wire.write(b"".join(lines) + b"\r\n")

    def _continue(self, body: bytes, more: bool) -> None:
        if self.answered:
            raise RuntimeError("a complete response cannot be continued")
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._wire.write(chunk if more else chunk + b"0\r\n\r\n")
        elif not self._bodiless:
            self._count(len(body), more)
            self._wire.write(body)
        if not more:
            self.answered = True
            # The application will not ask for it, and an exchange may live until the next garbage collection.
            self.body = bytearray()
            self._changed.set()
            self._wire.answered()

    def _part(self, body: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body

    def _count(self, size: int, more: bool) -> None:
        if self._remaining_bytes is None:
            return
        self._remaining_bytes -= size
        if self._remaining_bytes < 0 or (self._remaining_bytes and not more):
            raise RuntimeError(f"the response is {-self._remaining_bytes} bytes longer than its Content-Length")

    def _answer_failure(self) -> None:
        failed = json_response(answer(500, INTERNAL), 500, {"connection": "close"})
        self._begin(500, failed.raw_headers)
        self._continue(bytes(failed.body), more=False)
