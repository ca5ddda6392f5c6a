"""Which replicas exist: they announce themselves to a list, and every ingress follows it.

The list is a hint for finding replicas, and may be lost: the connections decide. A replica that is on no list but
connected stays; one that is on no list and not connected for a while is removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.backends.backend import Backend
from weft.fleet.backend import FleetBackend

log = logging.getLogger("weft")

# A replica announces itself at this interval, and an ingress reads the list at this interval.
BEAT_SECONDS = 1.0
READ_SECONDS = 0.5
# An announcement that was not repeated for this long counts no more.
LIFE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a replica serves routers, the secret that they must know, and whether it is about to end."""

    name: str
    host: str
    port: int
    secret: str
    version: str
    leaving: bool = False

    def __repr__(self) -> str:
        return f"Announcement({self.name} at {self.host}:{self.port}, leaving={self.leaving})"


class MemberList:
    """Announcements of replicas, by name. Ray calls its methods with plain values."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[str, tuple[float, dict[str, Any]]] = {}

    async def announce(self, announcement: Mapping[str, Any]) -> None:
        self._found[announcement["name"]] = (self._clock(), dict(announcement))
        self._forget_old()

    async def members(self) -> list[dict[str, Any]]:
        self._forget_old()
        return [announcement for _, announcement in self._found.values()]

    def _forget_old(self) -> None:
        since = self._clock() - LIFE_SECONDS
        self._found = {name: found for name, found in self._found.items() if found[0] >= since}


class Follower:
    """Keeps a fleet's members as a list says. `connect` makes the backend of an announced replica.

    A list that was started again is empty at first, so a replica that is missing there has time to return.
    """

    def __init__(
        self,
        fleet: FleetBackend,
        version: str,
        connect: Callable[[Announcement], Backend],
        drain_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        # When members that are on no list were first seen to be out of reach.
        self._missing: dict[str, float] = {}
        self._fleet = fleet
        self._version = version
        self._connect = connect
        self._drain_seconds = drain_seconds
        # Names may return only after they have left the list, or a replica that ends would be added again.
        self._left: set[str] = set()

    async def read(self, members: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
        """Ask for the list once and apply it. If no list answers, everything stays as it is."""
        try:
            self.apply([Announcement(**each) for each in await members()])
        except Exception as error:
            # Whatever went wrong: an ingress that no longer follows the list would lose its replicas one by one.
            log.warning("cannot read the list of replicas, keeping the known ones: %s", error)

    def apply(self, announcements: list[Announcement]) -> None:
        listed = {each.name: each for each in announcements if each.version == self._version}
        self._left &= listed.keys()
        known = {member.name: member for member in self._fleet.members}
        for name, each in listed.items():
            if each.leaving and name in known:
                self._remove(name)
            elif not each.leaving and name not in known and name not in self._left:
                log.info("replica %s has appeared at %s:%d", name, each.host, each.port)
                self._fleet.add(name, self._connect(each))
        now = self._clock()
        away = {name for name, member in known.items() if name not in listed and not member.backend.healthy}
        self._missing = {name: self._missing.get(name, now) for name in away}
        for name, since in self._missing.items():
            if now - since >= LIFE_SECONDS:
                self._remove(name)

    def _remove(self, name: str) -> None:
        if name not in self._left:
            log.info("replica %s leaves", name)
            self._left.add(name)
            self._fleet.remove(name, self._drain_seconds)
