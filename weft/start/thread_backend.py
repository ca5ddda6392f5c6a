"""A backend whose engine runs in a thread of this process: for tests, for `weft chat`, for embedding."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from time import perf_counter

from weft.backends.backend import ModelInfo
from weft.backends.dispatcher import Dispatcher
from weft.backends.life import MAX_OPEN, SHUTTING_DOWN
from weft.base.options import Options
from weft.engine.protocol import Command, Event, Shutdown
from weft.engine.service import Drivable, Service, ThreadInbox

Make = Callable[[], tuple[Drivable, ModelInfo]]


class ThreadBackend(Dispatcher):
    """`make` builds the engine; it is called once, in a thread, when the backend starts."""

    def __init__(self, make: Make, max_open: int = MAX_OPEN, patience_seconds: float | None = None) -> None:
        super().__init__(max_open, patience_seconds)
        self._make = make
        self._inbox = ThreadInbox()
        self._thread: threading.Thread | None = None

    @classmethod
    def from_options(
        cls,
        options: Options,
        progress: bool = True,
        max_open: int = MAX_OPEN,
        patience_seconds: float | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> ThreadBackend:
        """Return the backend of an engine with these options, which measures steps by the clock `now`."""

        def make() -> tuple[Drivable, ModelInfo]:
            from weft.start.engine_process import load_engine

            return load_engine(options, progress, now=now)

        return cls(make, max_open, patience_seconds)

    async def start(self) -> None:
        """Load the model; raises what loading raises."""
        loop = asyncio.get_running_loop()
        engine, self.info = await asyncio.to_thread(self._make)

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(self._receive, event)

        service = Service(engine, deliver, self.info.vocab_size)
        self._thread = threading.Thread(target=service.run, args=(self._inbox,), name="weft-engine", daemon=True)
        self._thread.start()
        self._closed = None
        self._watch()

    async def stop(self, drain_seconds: float) -> None:
        await self._drain(drain_seconds)
        if self._thread is not None:
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def end_now(self) -> None:
        """Fail all requests and end the engine after its step. Blocks, and may run after the event loop has ended."""
        self._watch_no_more()
        self._close(SHUTTING_DOWN)
        if self._thread is not None:
            self._inbox.put(Shutdown())
            self._thread.join()
            self._thread = None

    def _send(self, command: Command) -> None:
        self._inbox.put(command)
