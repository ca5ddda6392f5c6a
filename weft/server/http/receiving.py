"""Receives bodies within bounds: bytes, seconds and a least rate of each, and the bytes of all unfinished ones.

At the bound, the key that holds most gives way, and of its addresses the one that holds most: with its oldest body, if
that has taken long, otherwise with its newest. So slow clients make room for others, and never the other way round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request

from weft.base.errors import RequestError
from weft.base.returned_memory import return_free_memory
from weft.server.http.addresses import share_of
from weft.server.http.connections import Occasionally
from weft.server.settings import Limits

# The least rate holds for every period of this length.
WINDOW_SECONDS = 10.0
# First bytes of every body, which are not counted: a small request is never refused for the bodies of others.
FREE_BYTES = 16 << 10
# A body that has taken longer is slow: it gives way first.
PATIENCE_SECONDS = 5.0
# Memory goes back to the system when this much was held, and most of it was released a moment ago.
RETURNED_BYTES = 32 << 20
RETURN_SECONDS = 1.0
# Of a body that is not held in memory: least bytes a second on average, once the time of other bodies is over.
SPOOLED_RATE = 1 << 20
NO_ROOM = "the server is receiving too many bodies at once; try again later"

Timeout = Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]]


class Share:
    """Unfinished bodies of a key or an address, oldest first. `parts` are a key's addresses."""

    __slots__ = ("bodies", "held_bytes", "parts")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.bodies: dict[UnfinishedBody, None] = {}
        self.parts: dict[Hashable, Share] = {}


class UnfinishedBody:
    """A body in the course of being received. `window` ends the wait for its next bytes."""

    __slots__ = ("address", "began", "counted_bytes", "data", "key", "most", "window", "without_room")

    def __init__(self, key: Hashable, address: str | None, began: float, most: int) -> None:
        self.key = key
        self.most = most
        self.address = address
        self.began = began
        self.data = bytearray()
        self.counted_bytes = 0
        self.window: asyncio.Timeout | None = None
        self.without_room = False


class Receiving:
    """All bodies that a server receives. `clock` and `timeout` are its time."""

    def __init__(
        self, limits: Limits, *, clock: Callable[[], float] = time.monotonic, timeout: Timeout = asyncio.timeout
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._timeout = timeout
        # Counted bytes of all unfinished bodies, and their maximum since memory was returned.
        self.held_bytes = 0
        self._peak_bytes = 0
        self._shares: dict[Hashable, Share] = {}
        self._warnings = Occasionally(clock)

    async def read_body(self, request: Request, most: int | None = None) -> bytes:
        """Return a request's body; stop reading at a bound. `most` is a route's own bound on its bytes."""
        stated, most = request.headers.get("content-length", ""), most or self.limits.body_bytes
        if stated.isdigit() and int(stated[:20]) > most:
            raise too_large(most)
        body = self._begun(request, most)
        try:
            while not await self._received(request, body):
                pass
            return bytes(body.data)
        finally:
            # A traceback of the caller must not keep the bytes.
            body.data = bytearray()
            self._release(body)

    async def spool(self, request: Request, write: Callable[[bytes], Awaitable[None]], most: int) -> None:
        """Pass a request's body on as it arrives, up to `most` bytes. It must keep up the least rate of all bodies."""
        stated = request.headers.get("content-length", "")
        if stated.isdigit() and int(stated[:20]) > most:
            raise too_large(most)
        began = window = self._clock()
        size = before = 0
        more = True
        while more:
            try:
                async with self._timeout(WINDOW_SECONDS):
                    message = await request.receive()
            except TimeoutError:
                raise too_slow(self.limits.body_rate) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece, more = message.get("body", b""), bool(message.get("more_body", False))
            size += len(piece)
            if size > most:
                raise too_large(most)
            await write(piece)
            now = self._clock()
            if now - window >= WINDOW_SECONDS:
                if size - before < self.limits.body_rate * WINDOW_SECONDS:
                    raise too_slow(self.limits.body_rate)
                window, before = now, size
            if now - began > self.limits.body_seconds + size / SPOOLED_RATE:
                raise RequestError(f"the body took more than {self.limits.body_seconds:g} seconds", 408)

    def _begun(self, request: Request, most: int) -> UnfinishedBody:
        address = None if request.client is None else share_of(request.client.host)
        tenant: Any = request.scope.get("state", {}).get("tenant")
        # Without keys, every address stands for itself.
        key: Hashable = tenant.salt if tenant is not None and tenant.salt else ("address", address)
        return UnfinishedBody(key, address, self._clock(), most)

    async def _received(self, request: Request, body: UnfinishedBody) -> bool:
        """Receive for the time of a window, or until the end; return whether that was it."""
        before, left = len(body.data), self.limits.body_seconds - (self._clock() - body.began)
        seconds = min(WINDOW_SECONDS, max(0.0, left))
        try:
            async with self._timeout(seconds) as body.window:
                while await self._received_part(request, body):
                    pass
                return True
        except TimeoutError:
            if body.without_room:
                raise RequestError(NO_ROOM, 503) from None
            if left <= WINDOW_SECONDS:
                raise RequestError(f"the body took more than {self.limits.body_seconds:g} seconds", 408) from None
            if len(body.data) - before < seconds * self.limits.body_rate:
                raise too_slow(self.limits.body_rate) from None
            return False

    async def _received_part(self, request: Request, body: UnfinishedBody) -> bool:
        """Receive what has arrived; return whether more follows."""
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        # One buffer, because a body may come in millions of parts. An error's traceback must not keep the part.
        body.data += message.pop("body", b"")
        if len(body.data) > body.most:
            raise too_large(body.most)
        more = bool(message.get("more_body", False))
        if more and len(body.data) > FREE_BYTES:
            self._count(body, len(body.data) - FREE_BYTES - body.counted_bytes)
        return more

    # counting ---------------------------------------------------------------------------------------------------------

    def _count(self, body: UnfinishedBody, size: int) -> None:
        """Count more bytes of a body; raise if it is the one that gives way for them."""
        for share in self._shares_of(body):
            share.held_bytes += size
            share.bodies[body] = None
        body.counted_bytes += size
        self.held_bytes += size
        while self.held_bytes > self.limits.receiving_bytes:
            self._warnings.warn("unfinished bodies hold %d bytes, the limit: ending the slowest", self.held_bytes)
            last = self._last_in_line()
            self._release(last)
            if last is body:
                raise RequestError(NO_ROOM, 503)
            last.without_room = True
            if last.window is not None:
                # It may have received its end in this turn of the loop.
                with suppress(RuntimeError):
                    last.window.reschedule(asyncio.get_running_loop().time())
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)

    def _last_in_line(self) -> UnfinishedBody:
        key = max(self._shares.values(), key=lambda share: share.held_bytes)
        bodies = max(key.parts.values(), key=lambda share: share.held_bytes).bodies
        oldest = next(iter(bodies))
        return oldest if self._clock() - oldest.began > PATIENCE_SECONDS else next(reversed(bodies))

    def _shares_of(self, body: UnfinishedBody) -> tuple[Share, Share]:
        key = self._shares.setdefault(body.key, Share())
        return key, key.parts.setdefault(body.address, Share())

    def _release(self, body: UnfinishedBody) -> None:
        if not body.counted_bytes:
            return
        key, address = self._shares_of(body)
        for share in (key, address):
            share.held_bytes -= body.counted_bytes
            del share.bodies[body]
        if not address.bodies:
            del key.parts[body.address]
        if not key.bodies:
            del self._shares[body.key]
        self.held_bytes -= body.counted_bytes
        body.counted_bytes = 0
        if self._peak_bytes >= RETURNED_BYTES and self.held_bytes <= self._peak_bytes // 4:
            self._peak_bytes = self.held_bytes
            # By then the bytes are free.
            asyncio.get_running_loop().call_later(RETURN_SECONDS, return_free_memory)


def too_slow(least: int) -> RequestError:
    return RequestError(f"the body arrives too slowly: at least {least} bytes a second", 408)


def too_large(most: int) -> RequestError:
    return RequestError(f"the body exceeds {most} bytes", 413)
