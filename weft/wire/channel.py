"""Messages between two threads that wait for each other, on a private socket pair."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import msgspec

from weft.base.errors import WeftError
from weft.wire.frames import MAX_FRAME_BYTES, ProtocolError, framed, read_frame
from weft.wire.messages import Message, Writer
from weft.wire.versions import Protocol

READ_BYTES = 1 << 20


class ChannelClosed(WeftError):
    """The process at the other end has ended, or sent what is no message."""


class Channel:
    """One end of a socket pair. Both ends first say which protocol they speak; the other end checks it."""

    def __init__(self, connection: socket.socket, protocol: Protocol, limit: int = MAX_FRAME_BYTES) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        self._protocol = protocol
        self._limit = limit
        self._writer = Writer(limit=limit)
        self._greeted = False
        with suppress(ChannelClosed):
            # An end that is gone is noticed by the next call.
            self._write(framed(protocol.greeting))

    def send(self, message: Message) -> None:
        """Send a message. Any thread may call it."""
        self._write(self._writer.frame(message))

    def _write(self, data: bytes) -> None:
        try:
            with self._sending:
                self.connection.sendall(data)
        except OSError as error:
            raise ChannelClosed(f"the process at the other end has ended: {error}") from error

    def receive(self, kind: Any) -> Any:
        """Return the next message of a kind; wait for it. Raises `VersionError` if the ends differ in theirs."""
        if not self._greeted:
            self._protocol.check_greeting(self._body())
            self._greeted = True
        try:
            return msgspec.msgpack.decode(self._body(), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ChannelClosed(f"not a message: {error}") from error

    def _body(self) -> bytes:
        try:
            return read_frame(lambda count: received(self.connection, count), self._limit)
        except (OSError, EOFError, ProtocolError) as error:
            raise ChannelClosed(str(error)) from error

    def shut_down(self) -> None:
        """End the connection; the other end sees it."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()


def received(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes. Raises `EOFError` when the other end has ended."""
    found = bytearray()
    while len(found) < count:
        # Memory is used as bytes arrive, not as they are claimed.
        piece = connection.recv(min(READ_BYTES, count - len(found)))
        if not piece:
            raise EOFError("the process at the other end has ended")
        found += piece
    return bytes(found)
