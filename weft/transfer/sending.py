"""The sender's end of a transfer: connects, proves itself, offers a prefix, and sends the units that are granted.

If the receiver pulls them, a unit is sent when the receiver has taken it. A sender that ends earlier waits until the
receiver has closed the connection, which it does after its last read.
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic, perf_counter
from typing import Any

from weft.base.errors import WeftError
from weft.base.transfers import Destination, Granted, Offer, SendingEnded, StagedUnit, UnitsSent
from weft.memory.kinds import Kind
from weft.memory.tiers.exchange.sent_units import header_of_staged, piece_of
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
    Introduction,
    PulseMessage,
    ReadyMessage,
    RefuseMessage,
    TakenMessage,
    TransferError,
    UnitMessage,
    WayMessage,
    framed,
    read_from_receiver,
)
from weft.transfer.pulling import Carrier, NotPulled, address_of
from weft.wire.handshake import MAX_BYTES, RouterSide
from weft.wire.sockets import notice_death
from weft.wire.tls import client_context
from weft.wire.versions import TRANSFER

log = logging.getLogger("weft")

CONNECT_SECONDS = 10.0
# How long a sender waits for the end of a receiver that may still read. Then it makes reads impossible.
SETTLE_SECONDS = 10.0
# Pieces that are reported as sent together: each report wakes the engine's thread.
MOST_REPORTED = 16
# Orders to a connection: everything was sent; the transfer is to end.
FINISH, ABANDON = object(), object()
ABANDONED = "the transfer was abandoned"


class Confirmed(Exception):
    """The receiver has published all of the prefix."""


class ReceiverDebt:
    """Since when the receiver owes an answer: to the offer, the next grant, the next unit to take, or the confirmation.

    While the sender computes what was granted, the receiver owes nothing. A grant of nothing new is no answer.
    """

    def __init__(self, cells: int) -> None:
        self.since: float | None = None
        self._reading_since: float | None = None
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

    def ready(self) -> None:
        """Note that a unit may be read."""
        if self._reading_since is None:
            self._reading_since = monotonic()

    def taken(self, left: int) -> None:
        """Note that a unit was read, and that `left` others may be."""
        now = monotonic()
        self._reading_since = now if left else None
        if self.since is not None:
            self.since = now

    @property
    def overdue(self) -> bool:
        begun = [since for since in (self.since, self._reading_since) if since is not None]
        return bool(begun) and monotonic() - min(begun) > PATIENCE_SECONDS - PULSE_SECONDS


@dataclass(slots=True)
class Pull:
    """The sender's part of a transfer whose units are read by the receiver."""

    carrier: Carrier
    introduction: Introduction
    # Pieces that may be read, by place and start, and since when.
    untaken: dict[tuple[int, int], tuple[StagedUnit, int, float]] = field(default_factory=dict)


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
        self._offered: Pull | None = None
        # The same, once the receiver has agreed.
        self._pull: Pull | None = None
        self._way_known = False
        self._taken_at = 0.0
        # Sent and not reported yet.
        self._done: list[StagedUnit] = []
        # The network has failed and not the receiver: the socket's end does not say that the receiver has ended.
        self._lost = False

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
            if self._pull is not None:
                assert self._connection is not None
                # The receiver closes its end when it reads no more.
                self._connection.hang_up()
                self._connection.put(ABANDON)
            elif self._connection is not None:
                self._connection.cut()

    def _run(self) -> None:
        # Only a confirmation is a success, whatever else ends this thread.
        error: str | None = "the sender has failed"
        try:
            self._send()
        except Confirmed:
            error = None
        except (OSError, WeftError, UnicodeError) as failure:
            self._lost = isinstance(failure, OSError) and not isinstance(failure, ConnectionError)
            # UnicodeError: a host that is no name.
            error = ABANDONED if self._abandoned else str(failure) or type(failure).__name__
            if not self._abandoned:
                log.warning("a prefix was not sent to %s:%d: %s", self._destination.host, self._destination.port, error)
        except Exception:
            log.exception("a prefix was not sent to %s:%d", self._destination.host, self._destination.port)
        finally:
            self._settle()
            if self._connection is not None:
                self._connection.close()
            self._owner.gone(self.number, sending=True)
            self._owner.report(SendingEnded(self.number, error))

    def _settle(self) -> None:
        """Return when the receiver can read no staged unit any more."""
        pull, connection = self._pull, self._connection
        if pull is None:
            return
        assert connection is not None
        if pull.untaken:
            connection.hang_up()
            ended = not self._lost and connection.hears_end(SETTLE_SECONDS)
            while not ended and not pull.carrier.retire(pull.introduction.name):
                log.warning("the receiver at %s does not end its reads", self._destination.host)
                ended = connection.hears_end(SETTLE_SECONDS)
        pull.carrier.leave()

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
        connection.write(framed(self._owner.contract.offer(self._offer, self._introduce())))
        self._debt.begin()
        connection.serve(self._act, self._hear, MAX_MESSAGE_BYTES, self._pulse)

    def _introduce(self) -> Introduction | None:
        carriage = self._owner.carriage
        try:
            introduction = carriage.introduce(self._destination.secure)
        except NotPulled as error:
            if carriage.strict:
                raise
            carriage.note_fallback(str(error))
            return None
        assert carriage.carrier is not None
        self._offered = Pull(carriage.carrier, introduction)
        return introduction

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
        side = RouterSide(self._owner.secret, TRANSFER, channel_of(certificate))
        connection.write(side.proof(connection.read_message(MAX_BYTES)))
        side.check(connection.read_message(MAX_BYTES))

    # the connection's thread ----------------------------------------------------------------------------------------

    def _act(self, order: Any) -> None:
        assert self._connection is not None
        if order is ABANDON:
            raise TransferError(ABANDONED)
        if order is FINISH:
            self._report_done()
            self._connection.write(framed(FinishMessage()))
            self._debt.begin()
            return
        assert isinstance(order, StagedUnit)
        units = self._owner.memories.staged
        assert units is not None
        sizes = self._owner.contract.unit_bytes
        start, end = piece_of(order, sizes)
        payload = units(order.kind, order.unit)[start:end]
        header = header_of_staged(order, payload).encode()
        if self._pull is not None:
            self._pull.untaken[order.place, start] = (order, len(payload), perf_counter())
            self._debt.ready()
            self._connection.write(framed(ReadyMessage(header, start, address_of(payload))))
            return
        began = perf_counter()
        self._connection.write(framed(UnitMessage(header, start)))
        self._connection.write(payload)
        self._sent(order, len(payload), perf_counter() - began)

    def _sent(self, unit: StagedUnit, size_bytes: int, seconds: float) -> None:
        assert self._connection is not None
        self._owner.note_sent(size_bytes, seconds)
        self._done.append(unit)
        # Pieces that are read report at once, because no order may follow.
        if self._pull is not None or len(self._done) >= MOST_REPORTED or not self._connection.has_orders:
            self._report_done()
        sizes = self._owner.contract.unit_bytes
        if unit.kind == Kind.PAGE and piece_of(unit, sizes).end == sizes[Kind.PAGE]:
            self._debt.sent_page(unit.place)

    def _report_done(self) -> None:
        if self._done:
            self._owner.report(UnitsSent(self.number, tuple(self._done)))
            self._done.clear()

    def _hear(self, body: bytes) -> None:
        match read_from_receiver(body):
            case ConfirmMessage():
                if self._pull is not None and self._pull.untaken:
                    raise TransferError("the receiver has confirmed units that it has not taken")
                raise Confirmed
            case RefuseMessage(reason):
                raise TransferError(f"refused: {reason}")
            case WayMessage(pulls, reason):
                self._choose_way(pulls, reason)
            case TakenMessage(place, start):
                self._take_back(place, start)
            case GrantMessage(first, end, point):
                self._debt.granted(end)
                self._owner.report(Granted(self.number, first, end, point))

    def _choose_way(self, pulls: bool, reason: str) -> None:
        """Agree with the receiver on how units travel, once and before the first one."""
        if self._way_known or (pulls and self._offered is None):
            raise TransferError("the receiver chooses a way that was not offered")
        self._way_known = True
        if pulls:
            with self._lock:
                if self._abandoned:
                    raise TransferError(ABANDONED)
                self._pull = self._offered
            assert self._pull is not None
            self._pull.carrier.attend()
        elif self._owner.carriage.strict:
            raise TransferError(f"--transfer is nixl, and the decode engine does not pull: {reason}")
        elif self._offered is not None:
            self._owner.carriage.note_fallback(f"the decode engine does not pull: {reason}")

    def _take_back(self, place: int, start: int) -> None:
        pull = self._pull
        if pull is None or (place, start) not in pull.untaken:
            raise TransferError(f"the receiver has taken the unit of place {place}, which was not to be read")
        unit, size_bytes, ready_at = pull.untaken.pop((place, start))
        now = perf_counter()
        self._debt.taken(len(pull.untaken))
        # Reads of several units overlap.
        self._sent(unit, size_bytes, now - max(ready_at, self._taken_at))
        self._taken_at = now

    def _pulse(self) -> None:
        """Say that this end is alive; end a transfer whose receiver owes an answer for too long."""
        if self._debt.overdue:
            raise TransferError("the receiver does not answer")
        assert self._connection is not None
        self._connection.write(framed(PulseMessage()))
