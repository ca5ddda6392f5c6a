"""The life of a backend, whatever is behind it: not started, running, draining, closed, and perhaps failed for good."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, RequestError

if TYPE_CHECKING:
    from weft.backends.backend import PromptFiles

# Open requests, running or waiting, before further ones are refused.
MAX_OPEN = 1024
NOT_STARTED = "the engine is not ready"
SHUTTING_DOWN = "the server is shutting down"

S = TypeVar("S", bound=OutputStream)


class BackendLife(Generic[S]):
    """Base of all backends. Everything here runs in the event loop's thread."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        # Why requests are refused now; None: the engine runs.
        self._closed: str | None = NOT_STARTED
        self._draining = False
        self._numbers = itertools.count()
        self._streams: dict[int, S] = {}
        self._emptied = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""

    @property
    def files(self) -> PromptFiles | None:
        """What saves prompts to files and loads them, if there is one engine, on this machine."""
        return None

    @property
    def healthy(self) -> bool:
        """Whether the engine runs and accepts requests."""
        return self._closed is None and not self._draining

    @property
    def open(self) -> int:
        """Number of open requests."""
        return len(self._streams)

    def _check_running(self) -> None:
        if self._closed is not None:
            raise EngineStopped(self._closed)

    def _check_room(self) -> None:
        """Raise if no further request is accepted now."""
        self._check_running()
        if self._draining:
            raise EngineStopped(SHUTTING_DOWN)
        if len(self._streams) >= self._max_open:
            raise RequestError(f"the limit of {self._max_open} open requests is reached; try again later", status=429)

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)
        if not self._streams:
            self._emptied.set()

    async def _let_finish(self, seconds: float) -> None:
        """Accept nothing more, and let running requests finish for this long."""
        self._draining = True
        if self._streams and seconds > 0:
            self._emptied.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), seconds)

    def _fail_for_good(self, message: str) -> None:
        self._failure = message
        self._failed.set()

    async def wait_failed(self) -> str:
        """Wait until the backend has ended for good; return why."""
        await self._failed.wait()
        return self._failure
