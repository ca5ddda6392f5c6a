"""A backend whose engine is its own process: a crash there is an error here, and the interpreter lock is separate.

Front and engine communicate over a private socket pair. The engine's death closes the socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import cast

from weft.backends.backend import ModelInfo
from weft.backends.codec import Begin, EngineWriter, EventReader, Unloadable
from weft.backends.dispatcher import Dispatcher
from weft.backends.life import MAX_OPEN
from weft.base.child_processes import child_environment
from weft.base.errors import EngineStopped, ModelError, OptionError, WeftError
from weft.base.logs import LogFormat
from weft.base.options import Options
from weft.base.transfers import TransferSettings
from weft.engine.protocol import Command, Event, Shutdown, Stopped
from weft.wire.frames import Frames, ProtocolError

log = logging.getLogger("weft")

DIED = "the engine process has ended unexpectedly"
RESTARTING = "the engine process has ended unexpectedly and is restarting"
GOODBYE_SECONDS = 10.0
# This many restarts within this time are no accident.
MAX_RESTARTS = 5
RESTARTS_WITHIN_SECONDS = 600.0

Heard = Event | ModelInfo | Unloadable


class Link(asyncio.Protocol):
    """The front's end of the socket: splits input into messages and passes them, and the end, to the backend."""

    def __init__(self, hear: Callable[[Link, Heard], None], lost: Callable[[Link], None]) -> None:
        self._hear = hear
        self._lost = lost
        self._frames = Frames()
        self._reader = EventReader()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                event = self._reader.read(body)
                if event is not None:
                    self._hear(self, event)
        except ProtocolError as error:
            # The lost messages could never be answered.
            log.error("the engine process violated the protocol: %s", error)
            assert self.transport is not None
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(self)


class ProcessBackend(Dispatcher):
    """With `restart`, a dead engine is restarted; requests that were open still fail.

    A hanging engine is then killed and restarted too; without `restart` it only counts as unhealthy, or, with
    `kill_silent`, is killed too.

    `program` replaces the engine process; it gets the number of a file descriptor as argument. The process stays on
    `cores`, if there are any, and has `variables` in its environment. `transfer` gives the engine a role.
    """

    def __init__(
        self,
        options: Options,
        *,
        progress: bool = True,
        restart: bool = False,
        kill_silent: bool = False,
        max_open: int = MAX_OPEN,
        patience_seconds: float | None = None,
        program: Sequence[str] = (),
        log_format: LogFormat = "text",
        cores: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
        transfer: TransferSettings | None = None,
    ) -> None:
        super().__init__(max_open, patience_seconds)
        self._options = Options(**{each.name: getattr(options, each.name) for each in fields(Options)})
        self._progress = progress
        self._log_format = log_format
        self._cores = tuple(cores)
        self._variables = dict(variables or {})
        self._transfer = transfer
        self._restart = restart
        self._kill_silent = restart or kill_silent
        self._program = tuple(program) or (sys.executable, "-P", "-m", "weft.start.engine_process")
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._writer = EngineWriter()
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._stopping = False
        self._restarting: asyncio.Task[None] | None = None
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    # start and stop -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process and wait until the model is loaded; raises what loading raises."""
        self.info = await self._launch()
        self._closed = None
        self._watch()

    async def stop(self, drain_seconds: float) -> None:
        self._stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._drain(drain_seconds)
        if self._link is not None and self._process is not None and self._process.poll() is None:
            self._send(Shutdown())
        await self._bury(GOODBYE_SECONDS)

    @property
    def healthy(self) -> bool:
        return super().healthy and self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def _launch(self) -> ModelInfo:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                env=child_environment() | self._variables,
                # Not in the terminal's group: Ctrl-C is for the front.
                process_group=0,
            )
        try:
            link = self._link = Link(self._heard, self._lost)
            await loop.create_unix_connection(lambda: link, sock=ours)
            level = logging.getLogger("weft").getEffectiveLevel()
            own = (self._log_format, self._cores, self._transfer)
            self._write(self._writer.frame(Begin(self._options, self._progress, level, *own)))
            return await self._ready
        except BaseException:
            await self._bury(0)
            raise

    async def _bury(self, seconds: float) -> None:
        """Wait for the process to end; kill it if that takes longer than this."""
        process, link = self._process, self._link
        self._process = self._link = None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if link is not None and link.transport is not None:
            link.transport.abort()

    def _fell_silent(self) -> None:
        if self._kill_silent and self._process is not None:
            self._process.kill()

    # messages -------------------------------------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        self._write(self._writer.command(command))

    def _write(self, data: bytes) -> None:
        if self._link is None or self._link.transport is None:
            raise EngineStopped(DIED)
        self._link.transport.write(data)

    def _heard(self, link: Link, event: Heard) -> None:
        if link is not self._link:
            return
        if isinstance(event, ModelInfo):
            self._loaded(event)
        elif isinstance(event, Unloadable):
            self._loaded((OptionError if event.option else ModelError)(event.message))
        elif isinstance(event, Stopped):
            # The process is about to end; the rest happens when it has.
            self._close(event.message)
        else:
            self._receive(event)

    def _loaded(self, found: ModelInfo | WeftError) -> None:
        if self._ready is None or self._ready.done():
            return
        if isinstance(found, WeftError):
            self._ready.set_exception(found)
        else:
            self._ready.set_result(found)

    def _lost(self, link: Link) -> None:
        """Handle the end of the process, or of its connection."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineStopped("the engine process ended before the model was loaded"))
            return
        if link is not self._link:
            return
        reason = self._closed or DIED
        log.error("%s", reason)
        self._close(RESTARTING if self._restart and not self._stopping else reason)
        if not self._stopping:
            self._restarting = asyncio.get_running_loop().create_task(self._after_death(reason))

    async def _after_death(self, reason: str) -> None:
        await self._bury(1.0)
        if not self._restart:
            self._stopped(reason)
            return
        loop = asyncio.get_running_loop()
        while len(self._restarts) < MAX_RESTARTS or loop.time() - self._restarts[0] > RESTARTS_WITHIN_SECONDS:
            self._restarts.append(loop.time())
            try:
                self.info = await self._launch()
            except WeftError as error:
                log.error("cannot restart the engine: %s", error)
                await asyncio.sleep(1.0)
            else:
                self._closed = None
                self._subscribe_again()
                return
        self._stopped(f"{DIED} {MAX_RESTARTS} times")
