"""A client's HTTP/1.1 connection: the order of responses, and a deadline for every state. Knows no route.

A connection is always in one state. Every state in which the server waits for the client has a total deadline, however
many bytes arrive meanwhile:

    HANDSHAKE -> HEAD -> WORKING -> IDLE -> HEAD ...    WORKING has no deadline here: the application bounds the time
                   |        |                           of a body, `stall_seconds` that of an unread response
                   v        v
                   DISCARDING -> CLOSING                after a refusal, or a response to an unread body
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.types import Scope
from uvicorn.server import ServerState

from weft.server.access_log import REFUSED, AccessLog
from weft.server.http.addresses import TrustedProxies, share_of
from weft.server.http.connections import Connections
from weft.server.http.errors import response
from weft.server.http.exchange import HttpExchange, status_line
from weft.server.http.half_closed import HalfClosed
from weft.server.http.reader import Event, Head, Header, HttpReader, Mark
from weft.server.settings import Limits

# Body bytes that may wait for the application before reading pauses.
BODY_BUFFER_BYTES = 1 << 16
# Requests that a client may pipeline.
MAX_PIPELINED = 16
# Loop iterations until a new connection has been read once: open, start reading, poll, receive; one to spare.
FRESH_TURNS = 5


class State(Enum):
    """State of a connection. The value names the limit that ends it."""

    HANDSHAKE = "handshake_seconds"
    HEAD = "header_seconds"
    WORKING = None
    DISCARDING = "linger_seconds"
    IDLE = "idle_seconds"
    CLOSING = "stall_seconds"


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What all connections of a server share."""

    app: AccessLog
    limits: Limits
    connections: Connections
    proxies: TrustedProxies
    server: ServerState


@dataclass(frozen=True, slots=True)
class ConnectionRefusal:
    """An answer that the connection gives by itself. `scope` holds what is known of the request."""

    status: int
    message: str
    scope: Scope


class HttpConnection(asyncio.Protocol):
    """One client's connection. Requests run one after the other; responses leave in the order of the requests.

    `client` is the peer's address and port, None on a Unix socket.
    """

    def __init__(self, shared: ServerContext, client: tuple[str, int] | None, secure: bool) -> None:
        self.state = State.HANDSHAKE
        self._fresh = True
        self.write_paused = False
        self._shared = shared
        self._limits = shared.limits
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._peer = None if client is None else client[0]
        self._proxied = shared.proxies.trusts(self._peer)
        self.share = None if self._proxied else share_of(self._peer)
        self._scheme = "https" if secure else "http"
        self._transport: Any = None
        # Cancelling it ends a connection that has no transport yet.
        self.opening: asyncio.Task[None] | None = None
        self._cut = False
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._reading_paused = False
        # None once further input is ignored.
        self._reader: HttpReader | None = HttpReader(self._limits.header_bytes)
        self._discarded_bytes = 0
        self._head_begun = self._body_open = self._input_ended = False
        # The running request, and the last one whose headers have arrived.
        self._current: HttpExchange | None = None
        self._newest: Any = None
        self._queue: deque[HttpExchange] = deque()
        # Sent after the responses to earlier requests.
        self._refusal: ConnectionRefusal | None = None
        # On the loop's clock: when the newest head began, or the connection.
        self._begun = self._loop.time()

    # states -----------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._cut:
            transport.abort()
            return
        self.write = transport.write
        self._local = transport.get_extra_info("sockname")
        self._shared.server.connections.add(self)  # type: ignore[arg-type]  # uvicorn only shuts them down
        self._enter(State.HEAD)
        if self._refusal is not None:
            self._send_refusal()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_timer()
        self.resume_writing()
        self._shared.server.connections.discard(self)
        self._shared.connections.leave(self)
        self._client_left()

    def eof_received(self) -> bool:
        """Go on with a complete request if it can be found out whether its client has left; return whether it can."""
        self._reader, self._input_ended = None, True
        exchange = self._current
        if exchange is None or self._body_open or self._scheme == "https" or not exchange.can_probe:
            self._client_left()
            self._close()
            return False
        exchange.keep_alive = bool(self._queue)
        HalfClosed(self._transport, self._probe)
        return True

    def _probe(self) -> None:
        if self._current is not None:
            self._current.probe()

    def shutdown(self) -> None:
        """Close as soon as no request is in progress; uvicorn's server calls this when it ends."""
        self._queue.clear()
        if self._current is None:
            self._close()
        else:
            self._current.keep_alive = False

    def cut(self) -> None:
        """Close at once and drop unsent bytes."""
        self._cut = True
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            # uvloop establishes the connection nevertheless if it has begun: `connection_made` ends it.
            self.opening.cancel()

    def _enter(self, state: State) -> None:
        self._cancel_timer()
        self.state = state
        if state is State.WORKING:
            self._shared.connections.works(self)
        else:
            self._timer = self._loop.call_later(getattr(self._limits, state.value), self._late)
            if not self._fresh:
                self._shared.connections.waits(self)

    def settle(self, turns: int = FRESH_TURNS) -> None:
        """Allow the connection to be cut in favour of others, but not before what its client already sent is read."""
        if turns:
            self._loop.call_soon(self.settle, turns - 1)
            return
        self._fresh = False
        if self.state is not State.WORKING:
            self._shared.connections.waits(self)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self.state is State.HEAD:
            self._refuse(408, f"the request headers took more than {self._limits.header_seconds:g} seconds")
        elif self.state is State.CLOSING:
            self._transport.abort()
        else:
            self._close()

    def _close(self) -> None:
        """Close when everything is sent, or after `stall_seconds`."""
        self._reader = None
        if not self._transport.is_closing():
            self._transport.close()
            self._enter(State.CLOSING)

    def _linger(self) -> None:
        """Send no more, but read on for a while: closing with unread input would destroy the response."""
        self._reader = None
        if self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._discard()

    def _discard(self) -> None:
        self._discarded_bytes = 0
        self._enter(State.DISCARDING)

    def _client_left(self) -> None:
        self._reader = None
        self._queue.clear()
        if self._current is not None:
            self._current.leave()

    # refusals ---------------------------------------------------------------------------------------------------------

    def refuse(self, status: int, message: str) -> None:
        """Answer nothing on this connection but a refusal; call it before the connection is made."""
        self._refusal = ConnectionRefusal(status, message, self._blank_scope())

    def _refuse(self, status: int, message: str, scope: Scope | None = None) -> None:
        """Ignore further input; answer earlier requests, then send the refusal."""
        self._reader = None
        if self.state is State.DISCARDING:
            # This request already has its response.
            self._close()
            return
        if self._body_open:
            scope = self._newest.scope
            scope["state"][REFUSED] = status
            self._newest.leave()
            if self._newest is not self._current:
                self._queue.pop()
        self._refusal = ConnectionRefusal(status, message, scope or self._blank_scope())
        if self._current is None:
            self._send_refusal()

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        refusal = self._refusal
        sent = response(HTTPException(refusal.status, refusal.message))
        more = self._shared.app.refused(refusal.scope, refusal.status, self._loop.time() - self._begun)
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in (*sent.raw_headers, *more))
        self.write(status_line(refusal.status) + lines + b"connection: close\r\n\r\n" + bytes(sent.body))
        self._linger()

    # input ------------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.state is State.DISCARDING:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self._limits.linger_bytes:
                self._close()
        reader = self._reader
        if reader is None:
            return
        for event in reader.feed(data):
            self._take(event)
            if self._reader is None:
                return
        if reader.fault is not None:
            self._refuse(*reader.fault)
        self._regulate_reading()

    def _take(self, event: Event) -> None:
        if event is Mark.HEAD_BEGUN:
            self._head_begun = True
            self._begun = self._loop.time()
            if self._current is None and self.state is not State.HEAD:
                self._enter(State.HEAD)
        elif isinstance(event, Head):
            self._take_head(event)
        elif event is Mark.REQUEST_ENDED:
            self._body_open = False
            self._newest.end_body()
            if self.state is State.DISCARDING:
                self._enter(State.IDLE)
        elif not self._newest.answered:
            self._newest.feed(event)

    def _take_head(self, head: Head) -> None:
        self._head_begun = False
        if len(self._queue) == MAX_PIPELINED:
            message = f"at most {MAX_PIPELINED} requests may be pipelined"
            self._refuse(400, message, self._scope(head))
            return
        self._newest = HttpExchange(self, self._scope(head), self._shared.app, head.keep_alive, head.expects_continue)
        self._body_open = True
        if self._current is None:
            self._start(self._newest)
        else:
            self._queue.append(self._newest)

    def _scope(self, head: Head) -> Scope:
        named = self._shared.proxies.client(self._peer, head.headers) if self._proxied else None
        scheme = self._shared.proxies.scheme(self._peer, head.headers) if self._proxied else None
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": self._local[:2] if isinstance(self._local, tuple) else (self._local, None),
            "client": self._client if named is None else (named, 0),
            "scheme": scheme or self._scheme,
            "method": head.method,
            "root_path": "",
            "path": unquote(head.path.decode("ascii")),
            "raw_path": head.path,
            "query_string": head.query,
            "headers": head.headers,
            "state": {},
        }

    def _blank_scope(self) -> Scope:
        """Return the scope of a request whose head is not known."""
        return {"type": "http", "client": self._client, "method": "", "path": "", "headers": [], "state": {}}

    # requests, one after the other ------------------------------------------------------------------------------------

    def _start(self, exchange: HttpExchange) -> None:
        self._current = exchange
        self._enter(State.WORKING)
        if self._proxied and exchange.scope["client"] != self._client:
            # While the request runs, the connection counts for the client that the proxy represents.
            self.share = share_of(exchange.scope["client"][0])
            refusal = self._shared.connections.join(self)
            if refusal is not None:
                exchange.app = self._shared.app.around(response(HTTPException(*refusal)))
        task = self._loop.create_task(exchange.run())
        self._shared.server.tasks.add(task)
        task.add_done_callback(self._shared.server.tasks.discard)

    def body_taken(self) -> None:
        self._regulate_reading()

    def answered(self) -> None:
        assert self._current is not None
        self._shared.server.total_requests += 1
        keep_alive = self._current.keep_alive
        self._finish()
        if keep_alive:
            self._go_on()
        elif self._body_open or self._queue or self._refusal:
            self._queue.clear()
            self._linger()
        else:
            self._close()
        self._regulate_reading()

    def abandoned(self, answer_begun: bool) -> None:
        self._finish()
        if self._transport.is_closing():
            return
        if answer_begun:
            self._transport.abort()
        else:
            self._go_on()
            self._regulate_reading()

    def _finish(self) -> None:
        self._current = None
        if self._proxied:
            self._shared.connections.part(self)
            self.share = None

    def _go_on(self) -> None:
        if self._queue:
            self._start(self._queue.popleft())
        elif self._refusal is not None:
            self._send_refusal()
        elif self._input_ended:
            self._close()
        elif self._body_open:
            self._discard()
        else:
            self._enter(State.HEAD if self._head_begun else State.IDLE)

    def _regulate_reading(self) -> None:
        """Continue reading, unless requests or a body wait for the application."""
        newest = self._newest
        wanted = newest is not None and not newest.answered and not newest.gone
        pause = bool(self._queue) or (wanted and len(newest.body) > BODY_BUFFER_BYTES)
        if pause != self._reading_paused and not self._input_ended and not self._transport.is_closing():
            self._reading_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    # clients that do not read -----------------------------------------------------------------------------------------

    @property
    def default_headers(self) -> list[Header]:
        return self._shared.server.default_headers

    async def writable(self) -> None:
        await self._writable.wait()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()
        self._stall_timer = self._loop.call_later(self._limits.stall_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
