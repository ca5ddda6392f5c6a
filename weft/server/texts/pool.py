"""The front's text workers: a few processes that read large bodies, so that the front's interpreter lock stays free.

Bounded in every direction: workers, waiting bytes, seconds and memory of a job. A job that takes too long or whose
client has left ends with its process; the next job gets a fresh one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from weft.base.child_processes import child_environment
from weft.base.errors import EngineStopped, RequestError
from weft.server.settings import Limits
from weft.server.texts.messages import (
    MAX_REPLY_BYTES,
    Done,
    Failed,
    FromWorker,
    Job,
    Refused,
    WorkerSetup,
    framed,
    read_reply,
)
from weft.server.texts.prompt_builder import PromptFacts
from weft.wire.frames import HEADER_BYTES, ProtocolError, body_bytes

log = logging.getLogger("weft")

MAX_WORKERS = 4
BUSY = "the server is busy reading large requests; try again later"
ENDED = "the worker process that read this text was killed or ran out of memory"
# One thread and one malloc arena each, so that the bound on a worker's memory bounds what it uses.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
Timeout = Callable[[float], AbstractAsyncContextManager[object]]


def worker_count() -> int:
    """Return half the number of cores: the other half steps the engine and serves streams."""
    return max(1, min(MAX_WORKERS, (os.cpu_count() or 2) // 2))


class TextWorker:
    """One process and the front's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def launch(cls, setup: bytes, program: Sequence[str]) -> TextWorker:
        ours, theirs = socket.socketpair()
        with theirs:
            worker = cls(
                subprocess.Popen(
                    [*program, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__,
                    env=child_environment() | ENVIRONMENT,
                    process_group=0,
                )
            )
        try:
            worker._reader, worker._writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
            worker._writer.write(setup)
        except BaseException:
            ours.close()
            worker.kill()
            raise
        return worker

    async def ask(self, job: bytes) -> FromWorker:
        self._writer.write(job)
        await self._writer.drain()
        size = body_bytes(await self._reader.readexactly(HEADER_BYTES), MAX_REPLY_BYTES)
        reply: FromWorker = read_reply(await self._reader.readexactly(size))
        return reply

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and not self._reader.at_eof()

    def kill(self) -> None:
        """Kill the process. The kernel may take a while to free its memory, so another thread waits for the end."""
        self.process.kill()
        asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        with suppress(AttributeError):  # it was never connected
            self._writer.transport.abort()


class TextPool:
    """Everything here runs in the event loop's thread. Workers start when a job needs one, and stay.

    `program` replaces the worker program, `timeout` the time bound of a job.
    """

    def __init__(
        self,
        setup: Callable[[], WorkerSetup],
        limits: Limits,
        *,
        size: int | None = None,
        program: Sequence[str] = (),
        timeout: Timeout = asyncio.timeout,
    ) -> None:
        self._setup = setup
        self._limits = limits
        self._program = tuple(program) or (sys.executable, "-P", "-m", "weft.server.text_process")
        self._timeout = timeout
        self._first: bytes | None = None
        self._seats = asyncio.Semaphore(size or worker_count())
        self._idle: list[TextWorker] = []
        self._busy: set[TextWorker] = set()
        self._closed = False
        # Bytes of all jobs that run or wait.
        self.held_bytes = 0

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in (*self._idle, *self._busy)]

    async def start(self) -> None:
        """Start one worker, so that the first large body does not wait for it."""
        if not self._idle:
            self._idle.append(await self._launch())

    def stop(self) -> None:
        self._closed = True
        for worker in (*self._idle, *self._busy):
            worker.kill()
        self._idle.clear()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have workers until the end."""
        await self.start()
        try:
            yield
        finally:
            self.stop()

    async def run(self, name: str, facts: PromptFacts, body: bytes) -> bytes:
        """Return a worker's result for a body; raises what it raises. Cancelling ends the worker."""
        if self.held_bytes + len(body) > self._limits.waiting_bytes:
            raise RequestError(BUSY, 503)
        self.held_bytes += len(body)
        try:
            async with self._seats:
                reply = await self._reply(framed(Job(name, facts, body)))
        finally:
            self.held_bytes -= len(body)
        match reply:
            case Done(found):
                return found
            case Refused(message, status, field, code):
                raise RequestError(message, status, field=field, code=code)
        raise RuntimeError("a text worker failed; see the log")

    async def _reply(self, job: bytes) -> FromWorker:
        if self._closed:
            raise EngineStopped("the server is shutting down")
        worker = await self._take()
        self._busy.add(worker)
        whole = False
        try:
            async with self._timeout(self._limits.text_seconds):
                reply = await worker.ask(job)
            whole = not (isinstance(reply, Failed) or reply.leaving)
            return reply
        except TimeoutError:
            seconds = self._limits.text_seconds
            log.warning("killed a text worker: one body took more than %g seconds", seconds)
            raise RequestError(f"reading the body took more than {seconds:g} seconds", 503) from None
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError) as error:
            log.error("a text worker ended with exit code %s: %r", worker.process.poll(), error)
            raise RequestError(ENDED, 503) from None
        finally:
            self._busy.discard(worker)
            if whole and not self._closed:
                self._idle.append(worker)
            else:
                worker.kill()

    async def _take(self) -> TextWorker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()
        return await self._launch()

    async def _launch(self) -> TextWorker:
        if self._first is None:
            # A large vocabulary takes a while to serialise.
            self._first = await asyncio.to_thread(lambda: framed(self._setup()))
        return await TextWorker.launch(self._first, self._program)
