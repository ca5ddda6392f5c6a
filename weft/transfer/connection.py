"""One end of a transfer's connection, served by a thread: reads messages, and does what the engine asks in between.

The engine's thread only appends to a queue and rings a bell, so it never waits for the network.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic
from typing import Any, Protocol

from weft.base.transfers import TransferEvent
from weft.transfer.messages import Contract, PeerGone, TransferError
from weft.transfer.pulling import Carriage
from weft.wire.frames import read_frame
from weft.wire.handshake import PLAIN

# A peer that neither sends nor takes a byte for this long has gone.
PATIENCE_SECONDS = 30.0
# Interval between two signs of life of a sender that computes.
PULSE_SECONDS = 5.0


Units = Callable[[str, int], memoryview]


@dataclass(slots=True)
class Memories:
    """The bytes of units by kind and index: in the staging area, and in arrivals."""

    staged: Units | None = None
    arrived: Units | None = None


class TransferOwner(Protocol):
    """What connections need from their transport. Any thread may call it."""

    contract: Contract
    secret: bytes
    memories: Memories
    carriage: Carriage

    def report(self, event: TransferEvent) -> None:
        """Add an event for the engine."""

    def note_sent(self, size_bytes: int, seconds: float) -> None:
        """Refine the rate of sending."""

    def admit(self, number: int) -> bool:
        """Let a peer offer a prefix that has proved itself; return False if there are too many."""
        ...

    def note_refusal(self, reason: str) -> None:
        """Log, now and then, that peers are refused that have not proved themselves."""

    def gone(self, number: int, sending: bool) -> None:
        """Forget a connection that has ended."""


def channel_of(certificate: bytes | None) -> bytes:
    """Return the name of a channel in the handshake: a MAC for a transfer is of no use at the door for routers."""
    return sha256(b"weft transfer " + (PLAIN if certificate is None else certificate)).digest()


class TransferConnection:
    """`act` is called in the connection's thread with what was put; it raises to end the transfer."""

    def __init__(self, stream: socket.socket, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.stream = stream
        self.stream.settimeout(patience_seconds)
        self.patience_seconds = patience_seconds
        # Until then, everything must have been read that is read before `be_patient`.
        self._deadline: float | None = None
        self._orders: deque[Any] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._ringer.setblocking(False)
        self._closing = threading.Lock()
        self._closed = False
        self._stopped = False

    # any thread -----------------------------------------------------------------------------------------------------

    def put(self, order: Any) -> None:
        """Let the connection's thread act."""
        self._orders.append(order)
        with self._closing:
            if not self._closed:
                with suppress(BlockingIOError):
                    # A full bell rings already.
                    self._ringer.send(b"!")

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def cut(self) -> None:
        """End the connection, also in the middle of a unit."""
        self._shut(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Let the peer hear the end, and go on hearing the peer."""
        self._shut(socket.SHUT_WR)

    def stop(self) -> None:
        """Hear no more. The peer hears the end when the connection is closed, not before."""
        self._stopped = True
        self._shut(socket.SHUT_RD)

    def _shut(self, how: int) -> None:
        with self._closing:
            if not self._closed:
                with suppress(OSError):
                    # Of the socket itself: TLS objects are for one thread.
                    socket.socket.shutdown(self.stream, how)

    # the connection's thread ----------------------------------------------------------------------------------------

    def secure(self, context: ssl.SSLContext) -> None:
        """Encrypt the connection, as its server."""
        stream = context.wrap_socket(self.stream, server_side=True, do_handshake_on_connect=False)
        with self._closing:
            self.stream = stream
        stream.do_handshake()

    def hurry(self, seconds: float) -> None:
        """Give a stranger this much time for all that is read next, however it comes."""
        self._deadline = monotonic() + seconds

    def be_patient(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Give an authenticated peer more time."""
        self._deadline = None
        self.patience_seconds = seconds
        self.stream.settimeout(seconds)

    def serve(
        self,
        act: Callable[[Any], None],
        hear: Callable[[bytes], None],
        limit: int,
        pulse: Callable[[], None] | None = None,
    ) -> None:
        """Call `act` with orders and `hear` with messages, until one raises.

        While nothing happens, `pulse` is called now and then; without one, the peer must say something.
        """
        seconds = self.patience_seconds if pulse is None else PULSE_SECONDS
        while True:
            while self._orders:
                act(self._orders.popleft())
            ready = self._ready(seconds)
            if self._bell in ready:
                self._bell.recv(1 << 12)
            if self.stream in ready:
                hear(self.read_message(limit))
            if not ready and pulse is None:
                raise TransferError("the peer is silent")
            if not ready and pulse is not None:
                pulse()

    def _ready(self, seconds: float) -> list[socket.socket]:
        if isinstance(self.stream, ssl.SSLSocket) and self.stream.pending():
            return [self.stream]
        # Not select(), which refuses descriptors beyond 1023.
        poll, found = select.poll(), {self.stream.fileno(): self.stream, self._bell.fileno(): self._bell}
        for number in found:
            poll.register(number, select.POLLIN)
        return [found[number] for number, _ in poll.poll(1000 * seconds)]

    def read_message(self, limit: int) -> bytes:
        """Return the body of the next message. One beyond the limit is refused before it has arrived."""
        return read_frame(self._read, limit)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fill a piece of memory with the next bytes."""
        filled = 0
        while filled < len(view):
            if self._deadline is not None:
                left = self._deadline - monotonic()
                if left <= 0:
                    raise TransferError("the handshake takes too long")
                self.stream.settimeout(left)
            if self._stopped:
                # Bytes that have arrived already would be read all the same.
                raise PeerGone("the connection was stopped")
            try:
                count = self.stream.recv_into(view[filled:])
            except ConnectionError as error:
                raise PeerGone(str(error)) from error
            if not count:
                raise PeerGone("the peer has closed the connection")
            filled += count

    def hears_end(self, seconds: float) -> bool:
        """Read to the peer's end of the connection; return False if it is not known to have ended in this time."""
        deadline, ignored = monotonic() + seconds, bytearray(1 << 12)
        while (left := deadline - monotonic()) > 0:
            try:
                self.stream.settimeout(left)
                if not self.stream.recv_into(ignored):
                    return True
            except ConnectionError:
                # Its process has closed the socket, or is dead.
                return True
            except OSError:
                return False
        return False

    def write(self, data: bytes | memoryview) -> None:
        self.stream.sendall(data)

    def close(self) -> None:
        with self._closing:
            self._closed = True
            for each in (self.stream, self._bell, self._ringer):
                each.close()
