"""Transfers over TCP: a connection for each, authenticated like those of routers, and with TLS if that is configured.

Each connection has a thread. Units are received straight into their place in arrivals, and sent straight from the
staging area, unless both engines have a carrier (`pulling.py`). A slow peer stops its own transfer and no other.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from weft.base.transfers import (
    Destination,
    Offer,
    ReservedUnit,
    SendingEnded,
    StagedUnit,
    TransferEvent,
)
from weft.transfer.connection import Memories, channel_of
from weft.transfer.messages import Contract
from weft.transfer.pulling import Carriage
from weft.transfer.receiving import Ending, Granting, Incomer
from weft.transfer.sending import FINISH, Outgoer
from weft.wire.sockets import notice_death
from weft.wire.tls import TlsFiles, certificate_name

log = logging.getLogger("weft")

# Connections at once, in each direction; further ones are refused.
MOST_TRANSFERS = 64
# Peers that may be in the handshake at once; another one replaces the oldest.
MOST_STRANGERS = 32
HANDSHAKE_SECONDS = 5.0
BACKLOG = 64
ACCEPT_SECONDS = 0.2
# Pause after a connection that could not be accepted, and between two lines of the log about such connections.
PAUSE_SECONDS = 0.1
LOG_SECONDS = 10.0
# Weight of a new unit in the rate of sending.
RATE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class TransferDoor:
    """The bound socket on which a decode engine receives prefixes."""

    listener: socket.socket
    tls: TlsFiles | None = None
    handshake_seconds: float = HANDSHAKE_SECONDS


class TcpTransport:
    """Implements `Transport`. `wake` is called, from any thread, when there is something to poll."""

    def __init__(
        self,
        contract: Contract,
        secret: bytes,
        memories: Memories,
        door: TransferDoor | None = None,
        carriage: Carriage | None = None,
    ) -> None:
        self.contract = contract
        self.secret = secret
        self.memories = memories
        self.carriage = carriage or Carriage()
        self.wake: Callable[[], None] = lambda: None
        self.send_bytes_per_second: float | None = None
        self.send_seconds = 0.0
        self._events: deque[TransferEvent] = deque()
        self._happened = threading.Event()
        self._outgoing: dict[int, Outgoer] = {}
        self._incoming: dict[int, Incomer] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._refusals = 0
        self._logged_at = -LOG_SECONDS
        self._door = door
        if door is not None:
            self._tls = None if door.tls is None else door.tls.context()
            self._channel = channel_of(None if door.tls is None else certificate_name(door.tls))
            door.listener.listen(BACKLOG)
            door.listener.settimeout(ACCEPT_SECONDS)
            threading.Thread(target=self._accept, name="weft-transfers", daemon=True).start()

    @property
    def _closed(self) -> bool:
        return self._closing.is_set()

    # for connections --------------------------------------------------------------------------------------------------

    def report(self, event: TransferEvent) -> None:
        """Add an event for the engine. Any thread may call it."""
        self._events.append(event)
        # Once until the next poll: a bell that rings anyway need not ring again.
        if not self._happened.is_set():
            self._happened.set()
            self.wake()

    def note_sent(self, size_bytes: int, seconds: float) -> None:
        """Refine the rate of sending. Any thread may call it."""
        self.send_seconds += seconds
        if seconds > 0:
            rate, known = size_bytes / seconds, self.send_bytes_per_second
            self.send_bytes_per_second = rate if known is None else known + RATE_SHARE * (rate - known)

    def gone(self, number: int, sending: bool) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            table: dict[int, Any] = self._outgoing if sending else self._incoming
            table.pop(number, None)

    def _accept(self) -> None:
        assert self._door is not None
        while not self._closed:
            try:
                stream, _ = self._door.listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                self._rest(error)
                continue
            try:
                self._greet(stream)
            except (OSError, RuntimeError) as error:
                # There are no descriptors or threads left.
                stream.close()
                self._rest(error)

    def _rest(self, error: Exception) -> None:
        """Wait a little after an error that would occur again at once."""
        if not self._closed:
            self.note_refusal(str(error))
            self._closing.wait(PAUSE_SECONDS)

    def _greet(self, stream: socket.socket) -> None:
        assert self._door is not None
        notice_death(stream)
        with self._lock:
            strangers = [each for each in self._incoming.values() if not each.known]
            seconds = self._door.handshake_seconds
            incomer = Incomer(next(self._numbers), stream, self, self._tls, self._channel, seconds)
            self._incoming[incomer.number] = incomer
        if len(strangers) >= MOST_STRANGERS:
            strangers[0].abandon()
        try:
            incomer.start()
        except RuntimeError:
            self.gone(incomer.number, sending=False)
            incomer.close()
            raise

    def note_refusal(self, reason: str) -> None:
        """Log, now and then, that peers are refused that have not proved themselves. Any thread may call it."""
        with self._lock:
            self._refusals += 1
            now = monotonic()
            if now - self._logged_at < LOG_SECONDS:
                return
            count, self._refusals, self._logged_at = self._refusals, 0, now
        log.warning("refused %d connections for transfers, the last one because: %s", count, reason)

    def admit(self, number: int) -> bool:
        """Let a peer offer a prefix that has proved itself; return False if there are too many."""
        with self._lock:
            known = sum(each.known for each in self._incoming.values())
            self._incoming[number].known = known < MOST_TRANSFERS and not self._closed
            return self._incoming[number].known

    # Transport --------------------------------------------------------------------------------------------------------

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        with self._lock:
            if self._closed or len(self._outgoing) >= MOST_TRANSFERS:
                self.report(SendingEnded(transfer, f"{MOST_TRANSFERS} transfers are under way"))
                return
            outgoer = self._outgoing[transfer] = Outgoer(transfer, destination, offer, self)
        outgoer.start()

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        outgoer = self._outgoing.get(transfer)
        if outgoer is not None:
            for unit in units:
                outgoer.put(unit)

    def finish(self, transfer: int) -> None:
        outgoer = self._outgoing.get(transfer)
        if outgoer is not None:
            outgoer.put(FINISH)

    def abandon(self, transfer: int) -> None:
        outgoer = self._outgoing.get(transfer)
        if outgoer is not None:
            outgoer.abandon()

    def grant(self, transfer: int, first: int, end: int, point: bool, units: Sequence[ReservedUnit]) -> None:
        incomer = self._incoming.get(transfer)
        if incomer is not None:
            incomer.put(Granting(first, end, point, tuple(units)))

    def confirm(self, transfer: int) -> None:
        incomer = self._incoming.get(transfer)
        if incomer is not None:
            incomer.put(Ending(None))

    def refuse(self, transfer: int, reason: str) -> None:
        incomer = self._incoming.get(transfer)
        if incomer is not None:
            incomer.put(Ending(reason))

    def poll(self) -> list[TransferEvent]:
        self._happened.clear()
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._events.popleft())
        return found

    def wait(self, seconds: float) -> None:
        self._happened.wait(seconds)

    def close(self) -> None:
        self._closing.set()
        if self._door is not None:
            self._door.listener.close()
        with self._lock:
            connections: list[Outgoer | Incomer] = [*self._outgoing.values(), *self._incoming.values()]
        for connection in connections:
            connection.abandon()
        if self.carriage.carrier is not None:
            # Its reads end with it, for which connections wait.
            self.carriage.carrier.close()
