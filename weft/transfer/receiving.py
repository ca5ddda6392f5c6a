"""The receiver's end of a transfer: lets the peer prove itself, and reads granted units into their places.

Units come over the connection, or a carrier reads them out of the sender's memory. The connection is closed, and so the
sender hears the end, when no read writes any more.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any

from weft.base.errors import WeftError
from weft.base.transfers import Offered, ReceivingEnded, ReservedUnit, UnitReceived
from weft.memory.tiers.disk.format import UnitHeader, checksum, decode
from weft.memory.tiers.exchange.sent_units import GrantedPlaces
from weft.transfer.connection import TransferConnection, TransferOwner
from weft.transfer.messages import (
    MAX_MESSAGE_BYTES,
    MAX_OFFER_BYTES,
    MAX_REASON,
    ConfirmMessage,
    GrantMessage,
    OfferMessage,
    PeerGone,
    ReadyMessage,
    RefuseMessage,
    TakenMessage,
    TransferError,
    UnitMessage,
    WayMessage,
    framed,
    read_from_sender,
)
from weft.transfer.pulling import NotPulled, Readings
from weft.wire.handshake import MAX_BYTES, ReplicaSide
from weft.wire.versions import TRANSFER

log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True)
class Granting:
    """An order to a connection: let the peer send into these units."""

    first: int
    end: int
    point: bool
    units: tuple[ReservedUnit, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """An order to a connection: end the transfer, because all is published, or for a reason."""

    reason: str | None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """An order to a connection: a piece was read, or was not because of an error."""

    header: UnitHeader
    start: int
    view: memoryview
    error: str | None


class Incomer:
    """Receives one prefix."""

    def __init__(
        self,
        number: int,
        stream: socket.socket,
        owner: TransferOwner,
        tls: ssl.SSLContext | None,
        channel: bytes,
        handshake_seconds: float,
    ) -> None:
        self.number = number
        self._stream = stream
        self._owner = owner
        self._tls = tls
        self._channel = channel
        self._handshake_seconds = handshake_seconds
        self._connection = TransferConnection(stream, handshake_seconds)
        # Whether it has proved that it knows the secret.
        self.known = False
        self._offered = False
        self._granted = GrantedPlaces(owner.contract.unit_bytes)
        self._confirmed = False
        # The agent to read from, if units are pulled.
        self._peer: str | None = None
        self._readings = Readings()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"weft-receive-{self.number}", daemon=True).start()

    def put(self, order: Any) -> None:
        self._connection.put(order)

    def abandon(self) -> None:
        self._connection.stop()

    def close(self) -> None:
        """Give up a connection that was not started."""
        self._connection.close()

    def _run(self) -> None:
        try:
            self._receive()
        except PeerGone as error:
            # As after an abort.
            log.debug("a prefix was not received: %s", error)
        except (OSError, WeftError) as error:
            reason = str(error) or type(error).__name__
            if not self.known:
                self._owner.note_refusal(reason)
            elif not self._confirmed:
                log.warning("a prefix was not received: %s", reason)
        finally:
            self._readings.wait()
            self._connection.close()
            self._owner.gone(self.number, sending=False)
            if self._offered:
                self._owner.report(ReceivingEnded(self.number))

    def _receive(self) -> None:
        connection = self._connection
        connection.hurry(self._handshake_seconds)
        if self._tls is not None:
            connection.secure(self._tls)
        side = ReplicaSide(self._owner.secret, TRANSFER, self._channel)
        connection.write(side.hello())
        welcome = side.welcome(connection.read_message(MAX_BYTES))
        if not self._owner.admit(self.number):
            raise TransferError("too many transfers are under way")
        connection.write(welcome)
        connection.be_patient()
        message = read_from_sender(connection.read_message(MAX_OFFER_BYTES))
        if not isinstance(message, OfferMessage):
            raise TransferError("the first message must be an offer")
        try:
            offer = self._owner.contract.accept(message)
            way = self._choose_way(message)
        except TransferError as error:
            connection.write(framed(RefuseMessage(str(error)[:MAX_REASON])))
            raise
        connection.write(framed(way))
        self._offered = True
        self._owner.report(Offered(self.number, offer))
        connection.serve(self._act, self._hear, MAX_MESSAGE_BYTES)

    def _choose_way(self, message: OfferMessage) -> WayMessage:
        """Choose how units travel. Raises if they must be pulled and cannot be."""
        carriage = self._owner.carriage
        try:
            self._peer = carriage.meet(message.introduction)
        except NotPulled as error:
            if carriage.strict:
                raise TransferError(f"--transfer is nixl on the decode engine, but: {error}") from error
            carriage.note_fallback(str(error))
            return WayMessage(False, str(error)[:MAX_REASON])
        return WayMessage(True)

    def _act(self, order: Granting | Ending | ReadEnded) -> None:
        connection = self._connection
        if isinstance(order, ReadEnded):
            self._take_read(order)
        elif isinstance(order, Granting):
            self._granted.grant(order.units)
            connection.write(framed(GrantMessage(order.first, order.end, order.point)))
        elif order.reason is None:
            self._confirmed = True
            connection.write(framed(ConfirmMessage()))
        else:
            connection.write(framed(RefuseMessage(order.reason[:MAX_REASON])))
            raise TransferError(order.reason)

    def _hear(self, body: bytes) -> None:
        message = read_from_sender(body)
        if isinstance(message, OfferMessage):
            raise TransferError("a connection has one offer")
        if isinstance(message, UnitMessage):
            header, view = self._take_place(message)
            self._connection.read_into(view)
            self._accept(header, view)
        elif isinstance(message, ReadyMessage):
            self._read(message)

    def _take_place(self, message: UnitMessage | ReadyMessage) -> tuple[UnitHeader, memoryview]:
        """Return the header of a piece, and the memory that was granted for it."""
        header, start = decode(message.header), message.start
        if header is None:
            raise TransferError("the header of a unit is damaged")
        wrong = self._granted.misplaced(header, start)
        if wrong is not None:
            raise TransferError(wrong)
        place, units = self._granted.begin(header), self._owner.memories.arrived
        assert units is not None
        return header, units(place.kind, place.unit)[start : start + header.size]

    def _accept(self, header: UnitHeader, view: memoryview) -> None:
        """Check a piece that is in its place, and report its unit if it is whole."""
        if checksum(view) != header.checksum:
            raise TransferError(f"the unit of place {header.unit} is damaged")
        if self._granted.fill(header):
            self._owner.report(UnitReceived(self.number, header.unit))

    # pulled units ---------------------------------------------------------------------------------------------------

    def _read(self, message: ReadyMessage) -> None:
        """Begin to read a piece."""
        carrier = self._owner.carriage.carrier
        if self._peer is None or carrier is None:
            raise TransferError("a unit is to be pulled, which was not agreed")
        header, view = self._take_place(message)

        def ended(error: str | None) -> None:
            self._readings.end()
            self._connection.put(ReadEnded(header, message.start, view, error))

        self._readings.begin()
        carrier.read(self._peer, message.address, view, ended)

    def _take_read(self, order: ReadEnded) -> None:
        if order.error is not None:
            assert self._peer is not None
            self._owner.carriage.note_failure(self._peer, order.error)
            raise TransferError(f"the unit of place {order.header.unit} was not read: {order.error}")
        self._accept(order.header, order.view)
        self._connection.write(framed(TakenMessage(order.header.unit, order.start)))
