"""A replica on Ray: an engine, the socket on which it serves routers, and its place on the list of replicas."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from weft.base.errors import EngineStopped
from weft.fleet.listener import FleetDoor, FleetListener
from weft.ray.members import BEAT_SECONDS, READ_SECONDS, Announcement
from weft.ray.scaling import LOAD, QueueMeter, load_of
from weft.ray.settings import Autoscaling, FleetSettings, log_format
from weft.server.http.listener import bind
from weft.start.process_backend import ProcessBackend
from weft.start.thread_backend import ThreadBackend

log = logging.getLogger("weft")

# Time for the list to take an announcement, and to hear that the replica leaves.
ANNOUNCE_SECONDS = 5.0
GOODBYE_SECONDS = 2.0

Announce = Callable[[dict[str, Any]], Awaitable[Any]]


class EngineReplica:
    """One engine of the fleet. `announce` sends an announcement to the list of replicas.

    The secret is the replica's own, and only the list and those who read it get it. `role` counts if the fleet has
    prefill engines.
    """

    def __init__(self, settings: FleetSettings, name: str, host: str, announce: Announce, role: str = "decode") -> None:
        self._settings = settings
        self._announce = announce
        options, given = settings.engine_options(name), settings.serve_options
        patience = given.engine_timeout or None
        most = given.max_open_requests
        self.backend = QueueMeter(
            ThreadBackend.from_options(options, progress=False, max_open=most, patience_seconds=patience)
            if given.in_process
            else ProcessBackend(
                options,
                progress=False,
                max_open=most,
                patience_seconds=patience,
                log_format=log_format(given),
                transfer=settings.transfer(role, host),
            )
        )
        self._announcement = Announcement(name, host, 0, secrets.token_hex(32), settings.version)
        self._listener: FleetListener | None = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model, then serve routers. Raises what loading raises."""
        await self.backend.start()
        host = self._announcement.host
        listener = bind(host, 0)
        self._announcement = replace(self._announcement, port=listener.getsockname()[1])
        door = FleetDoor(host, self._announcement.port, self._announcement.secret.encode())
        self._listener = FleetListener(listener, self.backend, door)
        self._beating = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._announce(asdict(self._announcement)), ANNOUNCE_SECONDS)
            except Exception as error:
                log.warning("cannot announce replica %s: %s", self._announcement.name, error)
            await asyncio.sleep(BEAT_SECONDS)

    def check(self) -> None:
        """Raise if the engine has ended or does not respond."""
        if not self.backend.healthy:
            raise EngineStopped("the engine has ended or does not respond")

    def stats(self) -> dict[str, float]:
        """Return the numbers by which Ray Serve scales."""
        targets = self._settings.autoscaling or Autoscaling()
        return {LOAD: load_of(self.backend.open, self.backend.waiting_tokens, targets)}

    async def stop(self) -> None:
        """Say goodbye to the routers, let running requests finish, then end the engine."""
        if self._beating is not None:
            self._beating.cancel()
            with suppress(Exception):
                goodbye = self._announce(asdict(replace(self._announcement, leaving=True)))
                await asyncio.wait_for(goodbye, GOODBYE_SECONDS)
            # Until every ingress has read it, they send requests.
            await asyncio.sleep(2 * READ_SECONDS)
        await self.backend.stop(self._settings.serve_options.drain_seconds)
        if self._listener is not None:
            await self._listener.close()
