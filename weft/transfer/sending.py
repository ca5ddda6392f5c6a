"""The sender's end of a transfer: connects, proves itself, offers a prefix, and sends the units that are granted."""

from __future__ import annotations

import logging
import socket
import threading
from hashlib import sha256
from time import monotonic, perf_counter
from typing import Any

from weft.base.errors import WeftError
from weft.base.transfers import Destination, Granted, Offer, SendingEnded, StagedUnit, UnitsSent
from weft.fleet.handshake import MAX_BYTES, RouterSide
from weft.fleet.remote import client_context
from weft.fleet.sockets import notice_death
from weft.memory.kinds import Kind
from weft.memory.tiers.sent_units import header_of_staged
from weft.transfer.connection import (
    PATIENCE_SECONDS,
    PULSE_SECONDS,
    TransferConnection,
    TransferOwner,
    channel_of,
)
from weft.transfer.messages import (
    MAX_MESSAGE_BYTES,
    ConfirmMessage,
    FinishMessage,
    GrantMessage,
    PulseMessage,
    TransferError,
    UnitMessage,
    framed,
    read_from_receiver,
)

log = logging.getLogger("weft")

CONNECT_SECONDS = 10.0
# An order to a connection: everything was sent.
FINISH = object()
ABANDONED = "the transfer was abandoned"


class Confirmed(Exception):
    """The receiver has published all of the prefix."""


class ReceiverDebt:
    """Since when the receiver owes an answer: to the offer, the next grant of `cells` cells, or the confirmation.

    While the sender computes what was granted, the receiver owes nothing. A grant of nothing new is no answer.
    """

    def __init__(self, cells: int) -> None:
        self.since: float | None = None
        self._cells = cells
        self._granted = -1

    def begin(self) -> None:
        if self.since is None:
            self.since = monotonic()

    def granted(self, end: int) -> None:
        if end > self._granted:
            self._granted, self.since = end, None

    def sent_page(self, cell: int) -> None:
        if cell + 1 == self._granted < self._cells:
            self.begin()

    @property
    def overdue(self) -> bool:
        return self.since is not None and monotonic() - self.since > PATIENCE_SECONDS - PULSE_SECONDS


class Outgoer:
    """Sends one prefix. `put` takes staged units, in order, then `FINISH`."""

    def __init__(self, number: int, destination: Destination, offer: Offer, owner: TransferOwner) -> None:
        self.number = number
        self._destination = destination
        self._offer = offer
        self._owner = owner
        self._connection: TransferConnection | None = None
        self._early: list[Any] = []
        self._lock = threading.Lock()
        self._abandoned = False
        self._debt = ReceiverDebt(len(offer.keys))

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"weft-send-{self.number}", daemon=True).start()

    def put(self, order: Any) -> None:
        with self._lock:
            if self._connection is None:
                self._early.append(order)
            else:
                self._connection.put(order)

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._connection is not None:
                self._connection.cut()

    def _run(self) -> None:
        # Only a confirmation is a success, whatever else ends this thread.
        error: str | None = "the sender has failed"
        try:
            self._send()
        except Confirmed:
            error = None
        except (OSError, WeftError, UnicodeError) as failure:
            # UnicodeError: a host that is no name.
            error = ABANDONED if self._abandoned else str(failure) or type(failure).__name__
            if not self._abandoned:
                log.warning("a prefix was not sent to %s:%d: %s", self._destination.host, self._destination.port, error)
        except Exception:
            log.exception("a prefix was not sent to %s:%d", self._destination.host, self._destination.port)
        finally:
            if self._connection is not None:
                self._connection.close()
            self._owner.gone(self.number, sending=True)
            self._owner.report(SendingEnded(self.number, error))

    def _send(self) -> None:
        stream = self._connect()
        connection = TransferConnection(stream)
        with self._lock:
            self._connection = connection
            for order in self._early:
                connection.put(order)
            if self._abandoned:
                raise TransferError(ABANDONED)
        self._authenticate(connection)
        connection.write(framed(self._owner.contract.offer(self._offer)))
        self._debt.begin()
        connection.serve(self._act, self._hear, MAX_MESSAGE_BYTES, self._pulse)

    def _connect(self) -> socket.socket:
        there = self._destination
        stream = socket.create_connection((there.host, there.port), CONNECT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_death(stream)
        if not there.secure:
            return stream
        try:
            return client_context().wrap_socket(stream, server_hostname=there.host)
        except BaseException:
            stream.close()
            raise

    def _authenticate(self, connection: TransferConnection) -> None:
        certificate = None
        if self._destination.secure:
            found = connection.stream.getpeercert(binary_form=True)  # type: ignore[attr-defined]
            certificate = sha256(found).digest()
        side = RouterSide(self._owner.secret, channel_of(certificate))
        connection.write(side.proof(connection.read_message(MAX_BYTES)))
        side.check(connection.read_message(MAX_BYTES))

    # the connection's thread ----------------------------------------------------------------------------------------

    def _act(self, order: Any) -> None:
        assert self._connection is not None
        if order is FINISH:
            self._connection.write(framed(FinishMessage()))
            self._debt.begin()
            return
        assert isinstance(order, StagedUnit)
        units = self._owner.memories.staged
        assert units is not None
        payload = units(order.kind, order.unit)
        began = perf_counter()
        self._connection.write(framed(UnitMessage(header_of_staged(order, payload).encode())))
        self._connection.write(payload)
        self._owner.note_sent(len(payload), perf_counter() - began)
        self._owner.report(UnitsSent(self.number, (order,)))
        if order.kind == Kind.PAGE:
            self._debt.sent_page(order.place)

    def _hear(self, body: bytes) -> None:
        message = read_from_receiver(body)
        if isinstance(message, ConfirmMessage):
            raise Confirmed
        if not isinstance(message, GrantMessage):
            raise TransferError(f"refused: {message.reason}")
        self._debt.granted(message.end)
        self._owner.report(Granted(self.number, message.first, message.end, message.point))

    def _pulse(self) -> None:
        """Say that this end is alive; end a transfer whose receiver owes an answer for too long."""
        if self._debt.overdue:
            raise TransferError("the receiver does not answer")
        assert self._connection is not None
        self._connection.write(framed(PulseMessage()))
