"""The front of a fleet on Ray as an ASGI application: tokenises, renders and routes; the engines are elsewhere.

Ray Serve calls its lifespan in the process of an ingress: it starts when the first replica is connected, and stops
after the last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.cli.route import texts_of
from weft.cli.serve import settings_of
from weft.cli.sources import with_keys
from weft.fleet.backend import FleetBackend
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.fleet.routing import RoutedChoice
from weft.ray.members import READ_SECONDS, Announcement, Follower
from weft.ray.settings import FleetSettings, log_format, parse
from weft.server.app import create_app
from weft.server.front import pool_for
from weft.server.texts.pool import TextPool

log = logging.getLogger("weft")

# Silence of a connected replica before its requests go elsewhere. Its own engine has a longer limit.
PATIENCE_SECONDS = 10.0

Members = Callable[[], Awaitable[list[dict[str, Any]]]]


class FleetFront:
    """A running front: the fleet, its application, and the task that follows the list of replicas."""

    def __init__(self, settings: FleetSettings, members: Members) -> None:
        self._settings = settings
        self._options = with_keys(settings.serve_options, os.environ)
        self._server = settings_of(self._options)
        self._members = members
        self.fleet = FleetBackend([], chooser=RoutedChoice(), max_open=self._server.limits.open_sequences, patient=True)
        self._follower = Follower(self.fleet, settings.version, self._connect, self._server.drain_seconds)
        self._following: asyncio.Task[None] | None = None
        self._pool: TextPool | None = None
        self.app: ASGIApp

    def _connect(self, replica: Announcement) -> RemoteBackend:
        address = ReplicaAddress(replica.host, replica.port)
        most = self._server.limits.open_sequences
        return RemoteBackend(address, replica.secret.encode(), max_open=most, patience_seconds=PATIENCE_SECONDS)

    async def start(self) -> None:
        """Wait for the first replica, then load the texts of its model."""
        self._following = asyncio.ensure_future(self._follow())
        try:
            await self.fleet.start()
            texts = await asyncio.to_thread(texts_of, self._options, self.fleet.info)
            self._pool = pool_for(texts.tokenizer, texts.template, self._server, log_format(self._options))
            self.app = create_app(
                self.fleet,
                texts.tokenizer,
                texts.template,
                texts.end_tokens,
                self._server,
                texts.suggested,
                pool=self._pool,
            )
            await self._pool.start()
        except BaseException:
            await self.stop()
            raise

    async def _follow(self) -> None:
        while True:
            await self._follower.read(self._members)
            await asyncio.sleep(READ_SECONDS)

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.fleet.stop(self._server.drain_seconds)
        if self._pool is not None:
            self._pool.stop()


class IngressApp:
    """ASGI application of an ingress. Ray pickles it, so it holds plain settings until its lifespan starts.

    `members` returns a function that reads the list of replicas; it is called in the process of the ingress.
    """

    def __init__(self, settings: Mapping[str, Any], members: Callable[[], Members]) -> None:
        self._settings = dict(settings)
        self._members = members
        self._front: FleetFront | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            assert self._front is not None
            await self._front.app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            self._front = FleetFront(parse(self._settings), self._members())
            await self._front.start()
        except Exception as error:
            log.exception("the ingress cannot start")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._front.stop()
        await send({"type": "lifespan.shutdown.complete"})
