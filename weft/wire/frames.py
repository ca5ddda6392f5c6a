"""Frames on a byte stream: the length of a message in four bytes, big-endian, and the message.

A frame that is too long is refused before its content arrives.
"""

from __future__ import annotations

from weft.base.errors import WeftError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 27


class ProtocolError(WeftError):
    """A peer sent a message that violates the protocol."""


class Frames:
    """Splits a byte stream into the bodies of frames."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that these bytes complete."""
        buffer, bodies, start = self._buffer, [], 0
        buffer += data
        while len(buffer) - start >= HEADER_BYTES:
            first = start + HEADER_BYTES
            size = int.from_bytes(buffer[start:first], "big")
            if size > self._limit:
                raise ProtocolError(f"frame has {size} bytes; the limit is {self._limit}")
            if len(buffer) < first + size:
                break
            start = first + size
            bodies.append(bytes(memoryview(buffer)[first:start]))
        del buffer[:start]
        return bodies
