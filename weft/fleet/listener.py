"""The socket on which a replica serves routers: accepts, authenticates within bounds, then speaks the engine protocol.

A peer that has not proved that it knows the secret costs a small buffer for a few seconds, and nothing is decoded for
it but the handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from weft.backends.backend import Backend
from weft.backends.codec import FLEET, EngineWriter, decode_command
from weft.fleet.session import MAX_UNREAD_NEWS, EngineReplaced, RouterSession
from weft.wire.frames import HEADER_BYTES, Frames, ProtocolError
from weft.wire.handshake import MAX_BYTES, PLAIN, HandshakeError, ReplicaSide
from weft.wire.sockets import notice_death
from weft.wire.tls import TlsFiles, certificate_name
from weft.wire.versions import Protocol

log = logging.getLogger("weft")

HANDSHAKE_SECONDS = 5.0
# Peers that may be in the handshake at once, and those of one address; another one replaces the oldest, of its own
# address or of the one that has most.
MAX_STRANGERS = 32
MAX_STRANGERS_OF_ADDRESS = 8
# Pause between two peers: what strangers cost, above all TLS, must not keep the loop from serving routers.
ACCEPT_PAUSE_SECONDS = 0.005
# Refused peers in between are counted, not logged.
LOG_SECONDS = 10.0
MAX_ROUTERS = 16
# A router that does not read is cut off.
MAX_UNREAD_BYTES = 1 << 26
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class FleetDoor:
    """Where and how a replica listens for routers."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    tls: TlsFiles | None = None
    max_routers: int = MAX_ROUTERS
    handshake_seconds: float = HANDSHAKE_SECONDS
    protocol: Protocol = FLEET


class FleetListener:
    """Accepts routers for a backend. Create it in a running event loop, with a bound socket."""

    def __init__(self, listener: socket.socket, backend: Backend, door: FleetDoor) -> None:
        self.backend = backend
        self.door = door
        self.channel = PLAIN if door.tls is None else certificate_name(door.tls)
        self.routers: set[RouterLink] = set()
        self._tls = None if door.tls is None else door.tls.context()
        # Tasks of connections in the handshake, the oldest first, with the peer's address.
        self._strangers: dict[asyncio.Task[None], str] = {}
        self._refused = 0
        self._logged_at = -LOG_SECONDS
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listener = listener
        self._accepting = asyncio.ensure_future(self._accept())

    @property
    def strangers(self) -> int:
        """Number of connections in the handshake."""
        return len(self._strangers)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cannot accept a router: %s", error)
                await asyncio.sleep(0.1)
                continue
            address = str(peer[0])
            self._make_room(address)
            task = asyncio.ensure_future(self._greet(client))
            self._strangers[task] = address
            task.add_done_callback(lambda done: self._strangers.pop(done, None))
            await asyncio.sleep(ACCEPT_PAUSE_SECONDS)

    def _make_room(self, address: str) -> None:
        """Cut off the oldest stranger if there are too many: one address cannot keep the others out."""
        counts = Counter(self._strangers.values())
        if counts[address] >= MAX_STRANGERS_OF_ADDRESS:
            crowd = address
        elif len(self._strangers) >= MAX_STRANGERS:
            crowd = counts.most_common(1)[0][0]
        else:
            return
        oldest = next(task for task, owner in self._strangers.items() if owner == crowd)
        del self._strangers[oldest]
        oldest.cancel()

    def _log_refusal(self, reason: str) -> None:
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_SECONDS:
            log.warning("refused %d connections of routers; the last: %s", self._refused, reason)
            self._refused, self._logged_at = 0, now

    async def _greet(self, client: socket.socket) -> None:
        """Authenticate a peer; it becomes a router, or the connection is closed."""
        link = RouterLink(self)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_death(client)
            async with asyncio.timeout(self.door.handshake_seconds):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: link, client, ssl=self._tls, ssl_handshake_timeout=None if self._tls is None else 60
                )
                await link.known
        except (OSError, TimeoutError, HandshakeError, ProtocolError) as error:
            self._log_refusal(str(error) or "the handshake took too long")
            link.abort()
        except asyncio.CancelledError:
            # It may have become a router in the same turn of the loop.
            if link not in self.routers:
                link.abort()
            raise
        finally:
            if link.transport is None:
                client.close()

    async def close(self) -> None:
        tasks = [self._accepting, *self._strangers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for router in list(self.routers):
            router.abort()
        self._listener.close()


class RouterLink(asyncio.Protocol):
    """The replica's end of a connection."""

    def __init__(self, owner: FleetListener) -> None:
        self.transport: asyncio.Transport | None = None
        self.known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._handshake = ReplicaSide(owner.door.secret, owner.door.protocol, owner.channel)
        self._frames = Frames(MAX_BYTES)
        self._received = 0
        self._session: RouterSession | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._handshake.hello())

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            if self._session is None:
                self._authenticate(data)
            else:
                for body in self._frames.feed(data):
                    self._session.receive(decode_command(body))
        except EngineReplaced as replaced:
            log.info("%s: closing the connection of a router", replaced)
            self.abort()
        except (HandshakeError, ProtocolError) as error:
            if self.known.done():
                log.error("a router violated the protocol: %s", error)
            else:
                self.known.set_exception(error)
            self.abort()

    def _authenticate(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > HEADER_BYTES + MAX_BYTES:
            raise HandshakeError(f"the handshake has more than {MAX_BYTES} bytes")
        bodies = self._frames.feed(data)
        if not bodies:
            return
        welcome = self._handshake.welcome(bodies[0])
        if len(self._owner.routers) >= self._owner.door.max_routers:
            raise HandshakeError(f"the limit of {self._owner.door.max_routers} routers is reached")
        assert self.transport is not None
        # Below this size, the session is asked for more.
        self.transport.set_write_buffer_limits(high=MAX_UNREAD_NEWS)
        self._owner.routers.add(self)
        self._frames = Frames()
        writer = EngineWriter(self._owner.door.protocol, self._handshake.version)
        unread = self.transport.get_write_buffer_size
        self._session = RouterSession(self._owner.backend, self._write, unread, writer=writer)
        info = self._owner.backend.info
        # Paths of this machine concern no other.
        public = replace(info, settings={name: info.settings[name] for name in info.settings if name != "folder"})
        self.transport.write(welcome + writer.frame(public))
        self.known.set_result(None)
        log.info("a router has connected from %s", self.transport.get_extra_info("peername"))

    def _write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.error("a router does not read its answers: closing its connection")
            self.abort()

    def resume_writing(self) -> None:
        if self._session is not None:
            self._session.drained()

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.routers.discard(self)
        if not self.known.done():
            self.known.set_exception(HandshakeError("the peer closed the connection during the handshake"))
        # It may be that no task waits for it any more.
        self.known.cancelled() or self.known.exception()
        if self._session is not None:
            if self._session.open:
                log.warning("a router has gone: aborting its %d requests", self._session.open)
            self._session.close()
            self._session = None


@asynccontextmanager
async def listening(listener: socket.socket, door: FleetDoor, backend: Backend) -> AsyncIterator[None]:
    """Serve routers while the context is open."""
    found = FleetListener(listener, backend, door)
    log.info("serving routers at %s:%d%s", *listener.getsockname()[:2], "" if door.tls is None else " with TLS")
    try:
        yield
    finally:
        with suppress(asyncio.CancelledError):
            await found.close()
