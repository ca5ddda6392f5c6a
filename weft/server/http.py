"""The socket's side of HTTP: bounds on what uvicorn reads and on how long it waits for clients. Knows no route."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.server.errors import answer, json_response
from weft.server.settings import Limits


def bounded_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """A protocol for `uvicorn.Config(http=...)`."""
    return type("Bounded", (Bounded,), {"limits": limits})


class Bounded(HttpToolsProtocol):
    """Heads are bounded in bytes and time, for uvicorn's parser takes any.

    A client that reads nothing of its answer for too long is cut off, as if it had gone.
    """

    limits: ClassVar[Limits]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.head_bytes = 0
        self.in_head = True
        self.head_timer = self.loop.call_later(self.limits.header_seconds, self.head_late)
        self.stall_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, error: Exception | None) -> None:
        self.head_timer.cancel()
        self.resumed()
        super().connection_lost(error)

    # heads ------------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        # Only what belongs to a head that is still open stays counted; bodies have their own bound.
        self.head_bytes += len(data)
        super().data_received(data)
        if self.in_head and self.head_bytes > self.limits.header_bytes:
            self.refuse_head(431, f"the request's head exceeds {self.limits.header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_head = True
        self.head_timer.cancel()
        self.head_timer = self.loop.call_later(self.limits.header_seconds, self.head_late)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self.head_bytes = 0
        self.head_timer.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.head_bytes = 0
        self.in_head = True

    def head_late(self) -> None:
        if self.in_head:
            self.refuse_head(408, f"the request's head took more than {self.limits.header_seconds} seconds")

    def send_400_response(self, msg: str) -> None:
        self.refuse_head(400, "this is not HTTP/1.1")

    def refuse_head(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = bytes(json_response(answer(status, message)).body)
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    # clients that do not read -----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stall_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self.resumed()
        super().resume_writing()

    def resumed(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None
