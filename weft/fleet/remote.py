"""A backend on another machine: speaks the engine protocol over TCP, and connects again when the connection is lost."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import cast

from weft.backends.backend import ModelInfo
from weft.backends.codec import FLEET, EngineWriter, EventReader, Unloadable
from weft.backends.dispatcher import Dispatcher
from weft.backends.life import MAX_OPEN
from weft.base.errors import EngineStopped, OptionError, RequestError
from weft.engine.protocol import Command, Event, Stopped, Submit
from weft.wire.frames import Frames, ProtocolError
from weft.wire.handshake import MAX_BYTES, PLAIN, HandshakeError, RouterSide
from weft.wire.sockets import notice_death
from weft.wire.tls import client_context
from weft.wire.versions import Protocol

log = logging.getLogger("weft")

CONNECT_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 15.0
# A replica with more unread bytes gets no further requests until it has read them.
MAX_UNREAD_BYTES = 1 << 24
# Bound of a replica's message, whose bytes are kept until it is complete. Scores and news travel in pieces far below.
MAX_EVENT_BYTES = 1 << 24
LOST = "the connection to the replica is lost"
NOT_CONNECTED = "the replica is not connected"
UNREAD = "the replica does not read its requests fast enough; try again later"


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """The address of a replica's door for routers.

    >>> ReplicaAddress.parse("tls://[::1]:8100")
    ReplicaAddress(host='::1', port=8100, secure=True)
    """

    host: str
    port: int
    secure: bool = False

    @classmethod
    def parse(cls, url: str) -> ReplicaAddress:
        found = re.fullmatch(r"(tcp|tls)://(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})/?", url)
        if found is None or not 0 < int(found[4]) < 1 << 16:
            raise OptionError(
                f"a replica must be tcp://HOST:PORT or tls://HOST:PORT, the address of its --fleet-listen, got {url!r}"
            )
        return cls(found[2] or found[3], int(found[4]), found[1] == "tls")


class RemoteBackend(Dispatcher):
    """`start` waits, without limit, for the first connection. Requests that are open when it is lost fail."""

    def __init__(
        self,
        address: ReplicaAddress,
        secret: bytes,
        *,
        max_open: int = MAX_OPEN,
        patience_seconds: float | None = None,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        protocol: Protocol = FLEET,
    ) -> None:
        super().__init__(max_open, patience_seconds)
        self._closed = NOT_CONNECTED
        self._address = address
        self._secret = secret
        self._protocol = protocol
        self._first_pause = first_pause_seconds
        self._link: ReplicaLink | None = None
        self._lost = asyncio.Event()
        self._connected = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._connecting = asyncio.ensure_future(self._stay_connected())
        await self._connected.wait()
        self._watch()

    async def stop(self, drain_seconds: float) -> None:
        await self._drain(drain_seconds)
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._link is not None:
            self._link.abort()

    # connection -----------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        pause, logged = self._first_pause, ""
        while True:
            try:
                await self._connect()
            except Exception as error:  # whatever went wrong, the next try may succeed
                reason = str(error) or "no answer"
                if reason != logged:
                    log.warning("cannot connect to %s:%d: %s; trying again", *self._where, reason)
                    logged = reason
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                pause, logged = self._first_pause, ""
                await self._lost.wait()

    @property
    def host(self) -> str:
        """The replica's machine, as routers reach it."""
        return self._address.host

    @property
    def _where(self) -> tuple[str, int]:
        return self._address.host, self._address.port

    async def _connect(self) -> None:
        link = ReplicaLink(self)
        context = client_context() if self._address.secure else None
        self._lost.clear()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.get_running_loop().create_connection(lambda: link, *self._where, ssl=context)
                info = await link.ready
                if link.closed:
                    raise HandshakeError(LOST)
        except BaseException:
            link.abort()
            raise
        self._link, self.info = link, info
        if not self._draining:
            self._closed = None
            self._silent = False
            self._subscribe_again()
        self._connected.set()
        log.info("connected to %s:%d", *self._where)

    def handshake(self, channel: bytes) -> RouterSide:
        return RouterSide(self._secret, self._protocol, channel)

    def lost(self, link: ReplicaLink) -> None:
        if link is self._link:
            self._link = None
            log.warning("%s: %s:%d", LOST, *self._where)
            self._close(LOST)
            self._lost.set()

    # messages -------------------------------------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        if self._link is None:
            raise EngineStopped(NOT_CONNECTED)
        if isinstance(command, Submit) and self._link.unread_bytes > MAX_UNREAD_BYTES:
            # Another replica may have room.
            raise RequestError(UNREAD, 429)
        self._link.send(command)

    def heard(self, link: ReplicaLink, event: Event) -> None:
        if link is self._link and not isinstance(event, Stopped):
            self._receive(event)


class ReplicaLink(asyncio.Protocol):
    """The router's end of a connection: authenticates the replica, then splits input into events."""

    def __init__(self, owner: RemoteBackend) -> None:
        self.ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._handshake: RouterSide | None = None
        self._proved = self.closed = False
        self._frames = Frames(MAX_BYTES)
        self._reader: EventReader | None = None
        self._writer: EngineWriter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        notice_death(transport.get_extra_info("socket"))
        secure = transport.get_extra_info("ssl_object")
        certificate = None if secure is None else secure.getpeercert(binary_form=True)
        self._handshake = self._owner.handshake(PLAIN if certificate is None else sha256(certificate).digest())

    def send(self, command: Command) -> None:
        assert self._transport is not None
        assert self._writer is not None
        self._transport.write(self._writer.command(command))

    @property
    def unread_bytes(self) -> int:
        assert self._transport is not None
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            while self._reader is None:
                # One message at a time: what follows the last one has another bound.
                body, data = self._first_body(data)
                if body is None:
                    return
                self._greet(body)
            for body in self._frames.feed(data):
                self._take(body)
        except (HandshakeError, ProtocolError) as error:
            self._fail(error)
            self.abort()

    def _first_body(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Return the first message of the handshake in what has arrived, and the bytes behind it."""
        for size in range(1, len(data) + 1):
            bodies = self._frames.feed(data[size - 1 : size])
            if bodies:
                return bodies[0], data[size:]
        return None, b""

    def _greet(self, body: bytes) -> None:
        assert self._handshake is not None
        if not self._proved:
            assert self._transport is not None
            self._transport.write(self._handshake.proof(body))
            self._proved = True
        else:
            self._handshake.check(body)
            self._frames, self._reader = Frames(MAX_EVENT_BYTES), EventReader()
            self._writer = EngineWriter(self._handshake.protocol, self._handshake.version)

    def _take(self, body: bytes) -> None:
        assert self._reader is not None
        event = self._reader.read(body)
        if isinstance(event, ModelInfo):
            if not self.ready.done():
                self.ready.set_result(event)
        elif isinstance(event, Unloadable):
            raise ProtocolError("a running replica cannot fail to load")
        elif event is not None:
            self._owner.heard(self, event)

    def _fail(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
        else:
            log.error("the replica violated the protocol: %s", error)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if not self.ready.done():
            self.ready.set_exception(HandshakeError("the replica closed the connection during the handshake"))
        # It may be that no task waits for it any more.
        self.ready.cancelled() or self.ready.exception()
        self._owner.lost(self)
