"""The front's half of a backend: numbers requests, tracks their streams, and dispatches events to them.

The thread backend and the process backend implement the transport of commands and events.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weft.backends.backend import Hear, ModelInfo, PromptFiles
from weft.backends.life import MAX_OPEN, SHUTTING_DOWN, BackendLife
from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, RequestError
from weft.engine.protocol import (
    Command,
    Drop,
    End,
    EngineNews,
    Event,
    LoadPrompt,
    Outputs,
    Question,
    Replies,
    RequestFailed,
    SavePrompt,
    Stopped,
    Submit,
    Subscribe,
    Topic,
    WatchRequests,
)
from weft.engine.request import MOST_NAME, Request
from weft.engine.tracing.events import TraceBatch

log = logging.getLogger("weft")

# Maximum interval between heartbeat requests; the timeout is a multiple of it.
PULSE_SECONDS = 2.0
# Extra time for a heartbeat that had already arrived at the timeout: the front may have been suspended itself.
GRACE_SECONDS = 0.1
# The heartbeat of a replica whose engine has ended or does not respond.
UNWELL = False
SILENT = "the engine does not respond"


class Dispatcher(BackendLife[OutputStream], ABC):
    """Base of the backends of one engine. Everything here runs in the event loop's thread.

    An engine that has not responded for `patience_seconds` counts as unhealthy until it does; None: no timeout.
    """

    info: ModelInfo

    def __init__(self, max_open: int = MAX_OPEN, patience_seconds: float | None = None) -> None:
        super().__init__(max_open)
        self._patience = patience_seconds
        self._silent = False
        self._watching: asyncio.Task[None] | None = None
        self._submitting: dict[int, asyncio.Future[None]] = {}
        self._asking: dict[int, asyncio.Future[Any]] = {}
        self._subscribers: list[Callable[[EngineNews], None]] = []
        self._watchers: list[Hear] = []

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Send a command to the engine."""

    # calling --------------------------------------------------------------------------------------------------------

    @property
    def files(self) -> PromptFiles:
        return self

    @property
    def healthy(self) -> bool:
        return super().healthy and not self._silent

    async def submit(self, request: Request, save_to: str | None = None) -> OutputStream:
        self._check_room()
        if self._silent:
            raise EngineStopped(SILENT)
        loop = asyncio.get_running_loop()
        stream = OutputStream(next(self._numbers), loop)
        taken = loop.create_future()
        self._streams[stream.id], self._submitting[stream.id] = stream, taken
        try:
            self._send(Submit(stream.id, request) if save_to is None else SavePrompt(stream.id, request, save_to))
            await taken
        except asyncio.CancelledError:
            self.abort(stream)
            raise
        except (RequestError, EngineStopped):
            self._forget(stream.id)
            raise
        finally:
            self._submitting.pop(stream.id, None)
        return stream

    def abort(self, stream: OutputStream) -> None:
        self._end(stream, stopped=False)

    def finish(self, stream: OutputStream) -> None:
        self._end(stream, stopped=True)

    def _end(self, stream: OutputStream, stopped: bool) -> None:
        if stream.id in self._streams:
            self._send(End(stream.id, stopped))

    async def flush(self) -> int:
        return int(await self._ask(Topic.FLUSH))

    async def drop(self, tenant: bytes | None, prefix: bytes | None) -> dict[str, Any]:
        return dict(await self._answer_to(lambda number: Drop(number, tenant, prefix)))

    async def load_prompt(self, path: str, salt: bytes, share: float) -> dict[str, Any]:
        found = dict(await self._answer_to(lambda number: LoadPrompt(number, path, salt, share)))
        if "error" in found:
            raise RequestError(found["error"], found["status"])
        return found

    async def stats(self) -> dict[str, Any]:
        return dict(await self._ask(Topic.STATS))

    async def cache_report(self, limit: int) -> dict[str, Any]:
        return dict(await self._ask(Topic.CACHE, limit))

    def subscribe(self, hear: Callable[[EngineNews], None]) -> None:
        if hear not in self._subscribers:
            self._subscribers.append(hear)
        self._subscribe_again()

    def unsubscribe(self, hear: Callable[[EngineNews], None]) -> None:
        if hear in self._subscribers:
            self._subscribers.remove(hear)
            if not self._subscribers and self._closed is None:
                with suppress(EngineStopped):
                    self._send(Subscribe(wanted=False))

    def _subscribe_again(self) -> None:
        """Ask an engine that has just started, or whose news were lost, for news from the start."""
        if self._subscribers and self._closed is None:
            with suppress(EngineStopped):
                self._send(Subscribe())
        if self._watchers:
            self._watch_requests()

    def watch(self, hear: Hear) -> None:
        if hear not in self._watchers:
            self._watchers.append(hear)
        self._watch_requests()

    def unwatch(self, hear: Hear) -> None:
        if hear in self._watchers:
            self._watchers.remove(hear)
            if not self._watchers:
                self._watch_requests()

    def _watch_requests(self) -> None:
        """Tell the engine whether anyone watches. A replica of an older version reports nothing."""
        if self._closed is None:
            with suppress(EngineStopped, RequestError):
                self._send(WatchRequests(bool(self._watchers)))

    async def request_facts(self, name: str) -> list[dict[str, Any]]:
        return list(await self._answer_to(lambda number: Question(number, Topic.REQUEST, name=name[:MOST_NAME])))

    async def _ask(self, topic: Topic, limit: int = 0) -> Any:
        return await self._answer_to(lambda number: Question(number, topic, limit))

    async def _answer_to(self, question: Callable[[int], Command]) -> Any:
        self._check_running()
        number = next(self._numbers)
        answer = self._asking[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(number))
            return await answer
        finally:
            self._asking.pop(number, None)

    # heartbeats -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start to request heartbeats."""
        if self._patience is not None and self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._ask_for_life(self._patience))

    def _watch_no_more(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _ask_for_life(self, patience: float) -> None:
        while True:
            await asyncio.sleep(min(PULSE_SECONDS, patience / 2))
            if self._closed is not None:
                continue
            asked = asyncio.ensure_future(self._ask(Topic.PULSE))
            # If the engine has ended, other code handles it; here it only means that no heartbeat came.
            asked.add_done_callback(lambda task: task.cancelled() or task.exception())
            answered, _ = await asyncio.wait([asked], timeout=patience)
            if not answered:
                answered, _ = await asyncio.wait([asked], timeout=GRACE_SECONDS)
            if not answered:
                log.error("the engine has not responded for %g s", patience)
                self._silent = True
                self._fell_silent()
                await asyncio.wait([asked])
                log.warning("the engine responds again, or has ended")
            self._silent = _is_unwell(asked)

    def _fell_silent(self) -> None:
        """React to a missed heartbeat."""

    # events ---------------------------------------------------------------------------------------------------------

    def _receive(self, event: Event) -> None:
        match event:
            case Outputs(outputs, reports):
                streams = self._streams
                for output in outputs:
                    stream = streams.get(output.sequence)
                    if stream is None:
                        continue
                    if output.finish is not None:
                        stream.end(reports.get(output.sequence))
                        self._forget(output.sequence)
                    stream.push(output)
            case Replies():
                self._hear(event)
            case RequestFailed(number, message):
                self._fail(number, message)
            case EngineNews():
                for hear in list(self._subscribers):
                    hear(event)
            case TraceBatch():
                for watcher in list(self._watchers):
                    watcher(event)
            case Stopped(message):
                self._stopped(message)

    def _hear(self, replies: Replies) -> None:
        for number in replies.accepted:
            _resolve(self._submitting.get(number), None)
        for refusal in replies.refused:
            waiter = self._submitting.get(refusal.number)
            if waiter is not None and not waiter.done():
                waiter.set_exception(RequestError(refusal.message, refusal.status, field=refusal.field))
            self._forget(refusal.number)
        for number, value in replies.answers.items():
            _resolve(self._asking.get(number), value)

    def _fail(self, number: int, message: str) -> None:
        """End one request, accepted or not, as if the engine had ended."""
        stream, waiter = self._streams.get(number), self._submitting.get(number)
        self._forget(number)
        if waiter is not None and not waiter.done():
            waiter.set_exception(EngineStopped(message))
        elif stream is not None:
            stream.fail(message)

    def _stopped(self, message: str) -> None:
        """Handle the end of the engine."""
        self._close(message)
        self._fail_for_good(message)

    # ending ---------------------------------------------------------------------------------------------------------

    async def _drain(self, seconds: float) -> None:
        """Accept nothing more, let running requests finish for this long, and fail the rest."""
        self._watch_no_more()
        await self._let_finish(seconds)
        self._close(self._closed or SHUTTING_DOWN)

    def _close(self, message: str) -> None:
        """Fail all open requests and accept nothing more."""
        self._closed = message
        streams = list(self._streams.values())
        self._streams.clear()
        self._emptied.set()
        for stream in streams:
            stream.fail(message)
        for waiter in (*self._submitting.values(), *self._asking.values()):
            if not waiter.done():
                waiter.set_exception(EngineStopped(message))
        for watcher in list(self._watchers):
            watcher(None)


def _is_unwell(asked: asyncio.Future[Any]) -> bool:
    """Return whether a heartbeat says that the engine behind a replica does not serve."""
    return not asked.cancelled() and asked.exception() is None and asked.result() is UNWELL


def _resolve(waiter: asyncio.Future[Any] | None, value: Any) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(value)
