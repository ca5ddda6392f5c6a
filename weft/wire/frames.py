"""Frames on a byte stream: the length of a message in four bytes, big-endian, and the message.

A frame that is too long is refused before its content arrives.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.base.errors import WeftError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 27


class ProtocolError(WeftError):
    """A peer sent a message that violates the protocol."""


def framed(body: bytes, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Return a frame. A body beyond the limit is a bug of ours."""
    assert len(body) <= limit, f"message has {len(body)} bytes"
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_bytes(header: bytes | bytearray, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the size of the body that follows a header. Raises `ProtocolError` beyond the limit."""
    size = int.from_bytes(header, "big")
    if size > limit:
        raise ProtocolError(f"frame has {size} bytes; the limit is {limit}")
    return size


def read_frame(read: Callable[[int], bytes], limit: int = MAX_FRAME_BYTES) -> bytes:
    """Return the body of the next frame; `read` returns as many bytes as it is asked for."""
    return read(body_bytes(read(HEADER_BYTES), limit))


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
            end = first + body_bytes(buffer[start:first], self._limit)
            if len(buffer) < end:
                break
            start = end
            bodies.append(bytes(memoryview(buffer)[first:start]))
        del buffer[:start]
        return bodies
