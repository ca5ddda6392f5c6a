"""One engine of a fleet: its backend, the requests that it answers, and whether it may get more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from weft.backends.backend import Backend, ModelInfo
from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped
from weft.engine.request import Request

# Pause before an ejected member may return: doubled with every ejection that soon follows a return.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
# A member that has been up for this long starts again with the first pause.
STEADY_SECONDS = 120.0
LEFT = "the replica was given up before it answered"


class MovableStream(Protocol):
    """A request that another member can get as long as it has not begun."""

    def abandon(self) -> None:
        """Give up the member, unless it has begun."""


class MemberState(StrEnum):
    STARTING = "starting"
    WARMING = "warming"
    UP = "up"
    EJECTED = "ejected"  # until it answers heartbeats again
    DRAINING = "draining"
    REFUSED = "refused"  # it serves another model
    FAILED = "failed"  # it has ended for good


class Member:
    """A backend in a fleet. `name` is its number or URL, which metrics and reports show."""

    def __init__(self, name: str, backend: Backend, clock: Callable[[], float]) -> None:
        self.name = name
        self.backend = backend
        self.state = MemberState.STARTING
        # What the backend served when it was admitted; a new object means that its engine was started again.
        self.admitted: ModelInfo | None = None
        self.streams: set[MovableStream] = set()
        # `retries` counts requests that left this member for another one.
        self.ejections = self.failures = self.retries = self.saved_tokens = 0
        self.emptied = asyncio.Event()
        self.starting: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None
        self.probing: asyncio.Task[None] | None = None
        self._clock = clock
        self._submitting: set[asyncio.Task[OutputStream]] = set()
        self._pause = FIRST_PAUSE_SECONDS
        self._returns_at = self._readmitted_at = 0.0

    @property
    def open(self) -> int:
        """Number of requests that it has, or is about to get."""
        return len(self.streams) + len(self._submitting)

    @property
    def takes_requests(self) -> bool:
        return self.state is MemberState.UP and self.serves

    @property
    def serves(self) -> bool:
        """Whether the backend is healthy and has not changed since it was admitted."""
        return self.backend.healthy and self.backend.info is self.admitted

    @property
    def pause_is_over(self) -> bool:
        return self._clock() >= self._returns_at

    async def submit(self, request: Request) -> OutputStream:
        """Submit a request. Raises `EngineStopped` if the member is ejected before it accepts."""
        task = asyncio.ensure_future(self.backend.submit(request))
        self._submitting.add(task)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if not task.cancel() and not task.cancelled() and task.exception() is None:
                self.backend.abort(task.result())
            raise
        finally:
            self._submitting.discard(task)
        if task.cancelled():
            raise EngineStopped(LEFT)
        return task.result()

    def eject(self) -> bool:
        """Take the member out and give up the requests that it has not begun; return whether it was in before."""
        if self.state is not MemberState.UP:
            return False
        self.state = MemberState.EJECTED
        self.ejections += 1
        now = self._clock()
        if now - self._readmitted_at > STEADY_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        self._returns_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self.give_up()
        return True

    def postpone(self) -> None:
        """Wait for another pause: the member was asked for a sign of life and gave none."""
        self._returns_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def readmit(self) -> None:
        self.state = MemberState.UP
        self.admitted = self.backend.info
        self._readmitted_at = self._clock()

    def give_up(self) -> None:
        """Give up the requests that it has not begun to answer, so that other members get them."""
        for task in list(self._submitting):
            task.cancel()
        for stream in list(self.streams):
            stream.abandon()

    def enter(self, stream: MovableStream) -> None:
        self.streams.add(stream)
        self.emptied.clear()

    def leave(self, stream: MovableStream) -> None:
        self.streams.discard(stream)
        if not self.streams:
            self.emptied.set()
