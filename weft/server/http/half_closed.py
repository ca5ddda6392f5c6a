"""Watches a client that has closed its sending side: it may wait for its answer, or it may have left.

Both look alike. But the machine of a client that left answers the next bytes with a reset. So the connection sends
bytes that mean nothing, and looks whether it is still open. A client that left is noticed after one round trip.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

# A client that closes its receiving side later is noticed within this time.
PROBE_SECONDS = 5.0
# The pause between looks doubles, from less than most round trips.
FIRST_LOOK_SECONDS = 0.005
# Without any sign of the client's machine for this long, the kernel ends the connection.
UNANSWERED_SECONDS = 30
# Linux's number of the state of a connection that was reset; the state is the first byte of `TCP_INFO`.
CLOSED = 7


class HalfClosed:
    """`probe` sends bytes that mean nothing to the client. Ends when the transport is closed."""

    def __init__(self, transport: Any, probe: Callable[[], None]) -> None:
        self._transport = transport
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._socket = transport.get_extra_info("socket")
        # On a Unix socket, writing to a client that left fails at once.
        self._is_tcp = self._socket.family != socket.AF_UNIX
        if self._is_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNANSWERED_SECONDS)
        self._begin()

    def _begin(self) -> None:
        self._probe()
        self._look_after(FIRST_LOOK_SECONDS)

    def _look_after(self, seconds: float) -> None:
        self._loop.call_later(seconds, self._look, seconds)

    def _is_reset(self) -> bool:
        """Return whether the client has reset the connection. Where the system does not say, only a probe finds it."""
        knows = self._is_tcp and hasattr(socket, "TCP_INFO")
        return knows and self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSED

    def _look(self, pause: float) -> None:
        if self._transport.is_closing():
            return
        if self._is_reset():
            self._transport.abort()
        elif pause >= PROBE_SECONDS / 2:
            # All pauses since the last probe add up to twice the last one.
            self._begin()
        else:
            self._look_after(2 * pause)
