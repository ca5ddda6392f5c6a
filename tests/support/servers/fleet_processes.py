"""Replicas and routers as users start them: processes whose addresses outlive them, for tests of whole fleets.

Everything is awaited, never slept for: a replica is ready when its log says that it serves routers.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.models import tiny_model
from weft.fleet.remote import RemoteBackend, ReplicaAddress

# Far more than anything takes: with thirty busy processes on two cores a replica needs four minutes to start.
SECONDS = 1800
SECRET = "a secret of at least thirty-two characters"
ENGINE = ["--memory", "16MiB", "--max-length", "512", "--max-sequences", "4", "--threads", "1", "--exact", "--paranoid"]


def reserved_port() -> socket.socket:
    """Return a socket whose port a server may bind again and again: to no other program does the system give it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.05)


class FleetProcess:
    """A program that can be ended and started again at the same address."""

    ready = ""

    def __init__(self, folder: Path, name: str, drain_seconds: int) -> None:
        self.name = name
        self.drain = ["--drain-seconds", str(drain_seconds)]
        self.log = folder / f"{name}.log"
        self.reserved = reserved_port()
        self.port = int(self.reserved.getsockname()[1])
        # Whether it is ready, and how often it was ended, so that a client knows whether it ended under it.
        self.serves = False
        self.ends = 0
        self.process: asyncio.subprocess.Process | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        self.log.touch()
        before = len(self.log.read_text())
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "weft", *self.command()]
            self.process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        await until(lambda: self.ready in self.log.read_text()[before:] or not self.runs)
        assert self.runs, self.log.read_text()
        await self.wait_ready()
        self.serves = True

    async def wait_ready(self) -> None:
        """Wait for what the log does not say."""

    async def end(self, number: int) -> None:
        """Send a signal that ends it, and wait until it has ended."""
        assert self.process is not None
        self.serves, self.ends = False, self.ends + 1
        if self.runs:
            self.process.send_signal(number)
        async with asyncio.timeout(SECONDS):
            await self.process.wait()


class ReplicaProcess(FleetProcess):
    ready = "serving routers at"

    def __init__(self, folder: Path, name: str, drain_seconds: int, secret: Path) -> None:
        super().__init__(folder, name, drain_seconds)
        self._secret = secret
        self.url = f"tcp://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        door = ["--fleet-listen", f"127.0.0.1:{self.port}", "--fleet-secret", str(self._secret)]
        own = ["--port", "0", "--restart-engine", *self.drain]
        return ["serve", *tiny_model.ARGUMENTS, *ENGINE, *door, *own]

    @property
    def engines(self) -> list[int]:
        """Process ids of its engine, if that runs."""
        assert self.process is not None
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(each) for each in listed if b"engine_process" in _command_of(each)]

    async def ask(self, question: Callable[[RemoteBackend], Awaitable[Any]]) -> Any:
        """Ask the engine itself, as another router does."""
        backend = RemoteBackend(ReplicaAddress("127.0.0.1", self.port), SECRET.encode())
        await backend.start()
        try:
            return await question(backend)
        finally:
            await backend.stop(0)


class RouterProcess(FleetProcess):
    ready = "replica tcp://"

    def __init__(self, folder: Path, name: str, drain_seconds: int, secret: Path, replicas: Path) -> None:
        super().__init__(folder, name, drain_seconds)
        self._secret, self._replicas = secret, replicas
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        files = ["--replicas-file", str(self._replicas), "--fleet-secret", str(self._secret)]
        own = ["--port", str(self.port), *self.drain, "--replica-timeout", "5"]
        return ["route", *files, *own, "--model", str(tiny_model.FOLDER)]

    async def wait_ready(self) -> None:
        async with httpx.AsyncClient(base_url=self.url) as client:
            await until(lambda: answers(client))

    async def metric(self, name: str) -> dict[str, float]:
        """Return a metric of every replica, by its address."""
        async with httpx.AsyncClient(base_url=self.url, timeout=SECONDS) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        found = (line.removeprefix(f'{name}{{replica="').split('"} ') for line in lines if line.startswith(f"{name}{{"))
        return {replica: float(value) for replica, value in found}

    async def are_up(self, *replicas: ReplicaProcess) -> bool:
        """Return whether requests go to these replicas, and to no others."""
        return {url for url, up in (await self.metric("weft_replica_up")).items() if up} == {r.url for r in replicas}


async def answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code in (200, 503)
    except httpx.TransportError:
        return False


def _command_of(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


class Fleet:
    """Replicas, routers, and the file that lists the replicas."""

    def __init__(self, folder: Path, replicas: int, routers: int, drain_seconds: int = 5) -> None:
        self.folder = folder
        self.secret, self.file = folder / "secret", folder / "replicas"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)
        self.replicas = [ReplicaProcess(folder, f"replica{n}", drain_seconds, self.secret) for n in range(replicas)]
        self.routers = [
            RouterProcess(folder, f"router{n}", drain_seconds, self.secret, self.file) for n in range(routers)
        ]

    def list(self, *replicas: ReplicaProcess) -> None:
        """Write the file that routers read, by renaming, as operators should."""
        draft = self.folder / "replicas.new"
        draft.write_text("".join(f"{replica.url}\n" for replica in replicas))
        draft.rename(self.file)

    async def start(self) -> None:
        self.list(*self.replicas)
        await asyncio.gather(*(each.start() for each in (*self.replicas, *self.routers)))

    async def stop(self) -> None:
        for each in (*self.routers, *self.replicas):
            if each.runs:
                await each.end(signal.SIGKILL)
            each.reserved.close()
