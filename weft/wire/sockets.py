"""Options of the sockets between routers and replicas."""

from __future__ import annotations

import socket

# A peer that acknowledges nothing for this long is gone.
SILENCE_SECONDS = 30
PROBE_SECONDS = 5


def notice_death(connection: socket.socket) -> None:
    """Let the kernel end a connection whose peer has vanished without closing it, as machines do that lose power.

    Otherwise its requests would run on, and it would count as one of the routers that a replica accepts.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has all of these.
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_SECONDS // 2),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", SILENCE_SECONDS // 2 // PROBE_SECONDS),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE_SECONDS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
