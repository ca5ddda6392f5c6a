"""One open request as its caller sees it: the dispatcher queues outputs, and one task reads them."""

from __future__ import annotations

import asyncio

from weft.base.errors import EngineStopped
from weft.engine.events import Output, Report


class OutputStream:
    """Yields the outputs of a request as they arrive. Iterate it once, from one task.

    Each iteration yields everything that arrived since the last one. The last output has a `finish`, and `report` is
    set. If the engine dies, or a shutdown runs out of time, iteration raises `EngineStopped` after the outputs that
    arrived before.
    """

    __slots__ = ("_begun", "_ended", "_error", "_loop", "_outputs", "_waiter", "id", "report")

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.id = number
        self.report: Report | None = None
        self._loop = loop
        self._outputs: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._begun = self._ended = False
        self._error: EngineStopped | None = None

    @property
    def begun(self) -> bool:
        """Whether an output has arrived."""
        return self._begun

    @property
    def waits(self) -> bool:
        """Whether the request is open and has no output yet."""
        return not self._begun and not self._ended

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[Output]:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs

    # for the dispatcher ---------------------------------------------------------------------------------------------

    def push(self, output: Output) -> None:
        self._begun = True
        self._outputs.append(output)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def end(self, report: Report | None) -> None:
        """Mark the end: the last output was pushed."""
        self.report = report
        self._ended = True

    def fail(self, message: str) -> None:
        """Fail because the engine has ended: the reader gets earlier outputs, then `EngineStopped`."""
        if not self._ended:
            self._ended, self._error = True, EngineStopped(message)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
