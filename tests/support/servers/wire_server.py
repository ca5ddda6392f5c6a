"""A server without a model for tests of connections: a small application behind real sockets, on either event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from tests.support.servers.held_steps import SECONDS
from weft.base.errors import RequestError
from weft.server.access_log import AccessLog
from weft.server.http.errors import response
from weft.server.http.listener import bind, unix_listener
from weft.server.http.protocol import HttpConnection
from weft.server.http.receiving import Receiving
from weft.server.metrics.registry import Metrics
from weft.server.settings import Limits, ServerSettings
from weft.start.launch import Address, Server

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class EchoApp:
    """Answers with what it saw of a request: `/early` without reading its body, `/hold` when it is let go.

    `/stream` sends chunks of unknown number and length, `/gated` waits before the last, `/endless` has none.
    """

    def __init__(self, limits: Limits) -> None:
        self.receiving = Receiving(limits)
        self.held = 0
        self.ended: list[str] = []
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/broken":
            raise RuntimeError("the application is broken")
        if scope["path"] == "/unanswered":
            return
        with suppress(ClientDisconnect):
            await (await self._answer(scope, receive))(scope, receive, send)
        self.ended.append(scope["path"])

    async def _answer(self, scope: Scope, receive: Receive) -> Any:
        request = Request(scope, receive)
        if scope["path"] == "/early":
            return PlainTextResponse("early", 401)
        try:
            body = await self.receiving.read_body(request)
        except RequestError as error:
            return response(error)
        if scope["path"].startswith("/hold"):
            self.held += 1
            await self.go.wait()
        if scope["path"] in ("/stream", "/gated", "/endless"):
            return Chunks(self.go if scope["path"] == "/gated" else None, endless=scope["path"] == "/endless")
        seen = {"method": scope["method"], "path": scope["path"], "client": scope["client"], "scheme": scope["scheme"]}
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        return JSONResponse(
            {**seen, "query": scope["query_string"].decode(), "body": body.decode(), "headers": headers}
        )


class Chunks(Response):
    """An answer whose length is not known when it begins."""

    def __init__(self, go: asyncio.Event | None, endless: bool) -> None:
        super().__init__()
        self._go = go
        self._endless = endless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one ", b"two ", b"", b"three"):
            if part == b"three" and self._go is not None:
                await self._go.wait()
            await send({"type": "http.response.body", "body": part, "more_body": True})
        gone = asyncio.ensure_future(self._gone(receive))
        while self._endless and not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        gone.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class WireServer:
    """A running server, and clients of it."""

    def __init__(self, settings: ServerSettings, loop: str, tls: ssl.SSLContext | None, uds: Path | None) -> None:
        self._settings = settings
        self._factory = LOOPS[loop]
        self._tls = tls
        self._uds = uds
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(SECONDS)

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.call(self.app.go.set)
        self._thread.join(SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.app = EchoApp(self._settings.limits)
        self.metrics = Metrics()
        app = AccessLog(self.app, [], self.metrics, self._settings.log_requests)
        self.server = Server(app, self._settings, self._drain, self._listening, self._tls)
        bound = bind("127.0.0.1", 0) if self._uds is None else unix_listener(str(self._uds), 0o600)
        with bound as listener:
            await self.server.serve(sockets=[listener])

    async def _drain(self) -> None:
        """Leave nothing running: tests let go what they hold."""

    def _listening(self, address: Address) -> None:
        self.address = address
        self.name = self.server.servers[0].sockets[0].getsockname()
        self._ready.set()

    # what a test sees -------------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], Any]) -> Any:
        """Run something in the server's loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SECONDS)

    @property
    def open(self) -> list[HttpConnection]:
        return self.call(lambda: list(self.server.server_state.connections))

    def connect(self) -> socket.socket:
        wire = socket.socket(socket.AF_INET if self._uds is None else socket.AF_UNIX)
        wire.settimeout(SECONDS)
        wire.connect(self.name)
        return wire

    def ask(self, *sent: bytes) -> bytes:
        """Return everything that comes back for these bytes until the server closes the connection."""
        with self.connect() as wire:
            for part in sent:
                wire.sendall(part)
            return rest_of(wire)


def rest_of(wire: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while part := wire.recv(65536):
            received += part
    return received


def receive_until(wire: socket.socket, end: bytes) -> bytes:
    """Return what comes, up to and with these bytes, or all there is."""
    received = b""
    while not received.endswith(end):
        part = wire.recv(1)
        if not part:
            break
        received += part
    return received


def drip_until_closed(wire: socket.socket, byte: bytes = b"x") -> None:
    """Send a byte at a time until the server has closed the connection."""
    wire.settimeout(0.01)
    for _ in range(100 * SECONDS):
        try:
            wire.send(byte)
            if not wire.recv(65536):
                # The server sends no more, but it may still receive.
                time.sleep(0.01)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return
    raise AssertionError("the server keeps the connection")


def get(path: str = "/", version: str = "1.1", *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/{version}", "Host: localhost", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def json_of(answer: bytes) -> Any:
    """Return the JSON body of the last answer in these bytes."""
    return json.loads(answer.rpartition(b"\r\n\r\n")[2])


@contextmanager
def wire_server(
    limits: Limits | None = None,
    loop: str = "uvloop",
    tls: ssl.SSLContext | None = None,
    uds: Path | None = None,
    settings: ServerSettings | None = None,
    **more: Any,
) -> Iterator[WireServer]:
    """`more` are settings beside the limits, unless all of them are given."""
    chosen = settings or ServerSettings(limits=limits or Limits(), **more)
    server = WireServer(chosen, loop, tls, uds)
    server.start()
    try:
        yield server
    finally:
        server.stop()
