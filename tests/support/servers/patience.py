"""Bounds for connections that no test reaches by accident."""

from __future__ import annotations

from weft.server.settings import Limits

# Every deadline but one is far away, so that a test that ends shows which one ended it.
FAR = 3000.0
PATIENT = Limits(
    handshake_seconds=FAR,
    header_seconds=FAR,
    body_seconds=FAR,
    linger_seconds=FAR,
    idle_seconds=FAR,
    stall_seconds=FAR,
    header_bytes=4096,
    body_bytes=1 << 16,
)
