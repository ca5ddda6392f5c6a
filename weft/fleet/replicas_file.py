"""The file that lists a router's replicas, a URL per line; read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from weft.backends.backend import Backend
from weft.base.errors import OptionError
from weft.fleet.backend import FleetBackend
from weft.fleet.remote import ReplicaAddress

log = logging.getLogger("weft")

LOOK_SECONDS = 1.0
MAX_BYTES = 1 << 16
MAX_REPLICAS = 256

Connect = Callable[[ReplicaAddress], Backend]


def parse_replicas(lines: list[str]) -> list[str]:
    """Return the URLs of a list, which may have comments; each must be an address and occur once.

    >>> parse_replicas(["# rack 1", "tcp://10.0.0.1:8100", ""])
    ['tcp://10.0.0.1:8100']
    """
    urls = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    for url in urls:
        ReplicaAddress.parse(url)
        if urls.count(url) > 1:
            raise OptionError(f"replica {url} is listed twice")
    if not 0 < len(urls) <= MAX_REPLICAS:
        raise OptionError(f"there must be 1 to {MAX_REPLICAS} replicas, got {len(urls)}")
    return urls


def read_replicas(path: str) -> list[str]:
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise OptionError(f"it has more than {MAX_BYTES} bytes")
        return parse_replicas(data.decode().splitlines())
    except (OSError, UnicodeDecodeError, OptionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot use replicas_file {path}: {reason}") from None


class ReplicasFile:
    """Keeps a fleet's members as the file lists them: new ones join, missing ones drain and leave."""

    def __init__(self, path: str, fleet: FleetBackend, connect: Connect, drain_seconds: float) -> None:
        self._path = path
        self._fleet = fleet
        self._connect = connect
        self._drain_seconds = drain_seconds
        self._seen = self._state()
        self._urls = [member.name for member in fleet.members]

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(Path(self._path).expanduser())
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def look(self) -> None:
        """Read the file again if it has changed. A file that cannot be used changes nothing."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._urls = read_replicas(self._path)
            except OptionError as error:
                log.error("%s; keeping the replicas", error)
        # Not only when the file has changed: one that is listed again joins when it has drained and left.
        known = {member.name for member in self._fleet.members}
        for name in known - set(self._urls):
            self._fleet.remove(name, self._drain_seconds)
        for url in self._urls:
            if url not in known:
                log.info("replica %s is new", url)
                self._fleet.add(url, self._connect(ReplicaAddress.parse(url)))


@asynccontextmanager
async def watched(file: ReplicasFile, seconds: float = LOOK_SECONDS) -> AsyncIterator[None]:
    """Look at the file at intervals while the context is open."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(seconds)
            file.look()

    task = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
