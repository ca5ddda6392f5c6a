"""Serves one router on a replica: the engine protocol on one side, a backend on the other.

Ends with its connection; requests of a router that has vanished are aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from weft.backends.backend import Backend
from weft.backends.codec import EngineWriter
from weft.backends.dispatcher import UNWELL
from weft.backends.life import MAX_OPEN
from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, RequestError, WeftError
from weft.engine.events import Output, Report
from weft.engine.protocol import (
    Command,
    Drop,
    End,
    EngineNews,
    Event,
    Outputs,
    Question,
    Refusal,
    Refuse,
    Replies,
    RequestFailed,
    Submit,
    Subscribe,
    Topic,
    WatchRequests,
)
from weft.engine.request import Request
from weft.engine.tracing.events import TraceBatch
from weft.wire.frames import ProtocolError

log = logging.getLogger("weft")

# Questions of one router that wait for an answer.
MAX_QUESTIONS = 64
# A router with more unread bytes gets no news until it has read them, so that outputs do not wait behind news.
MAX_UNREAD_NEWS = 1 << 16
# Changes of the cache that wait for a router; with more, its news start over. Routers share the memory of changes.
MOST_WAITING_CHANGES = 1 << 21
BUSY = "the replica has too many open requests; try again later"


class EngineReplaced(WeftError):
    """The engine is not the one that the router connected to."""


class RouterSession:
    """`write` sends bytes to the router; `unread` returns how many it has not taken yet."""

    def __init__(
        self,
        backend: Backend,
        write: Callable[[bytes], None],
        unread: Callable[[], int] = lambda: 0,
        max_open: int = MAX_OPEN,
        writer: EngineWriter | None = None,
    ) -> None:
        self._writer = writer or EngineWriter()
        self._backend = backend
        self._info = backend.info
        self._write = write
        self._unread = unread
        self._max_open = max_open
        self._streams: dict[int, OutputStream | None] = {}
        # Requests that the router ended before the backend accepted them: whether as if they had stopped.
        self._ending: dict[int, bool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions = 0
        self._outputs: list[Output] = []
        self._reports: dict[int, Report] = {}
        self._flushing: asyncio.Handle | None = None
        self._hear = self._send_news
        self._news: deque[EngineNews] = deque()
        self._waiting_changes = 0
        self._lost_news = False
        self._watch = self._send_trace
        self._lost_events = 0

    @property
    def open(self) -> int:
        """Number of open requests."""
        return len(self._streams)

    def receive(self, command: Command) -> None:
        """Handle a command. Raises `ProtocolError` for one that only a front may send.

        Raises `EngineReplaced` if the engine was started again: a router must connect to it anew, and warm it.
        """
        if self._backend.info is not self._info:
            raise EngineReplaced("the engine was started again")
        match command:
            case Submit(number, request):
                self._submit(number, request)
            case Refuse(number, message, field):
                self._send(Replies(refused=[Refusal.of(number, RequestError(message, field=field))]))
            case End(number, stopped):
                self._end(number, stopped)
            case Question() | Drop():
                self._ask(command)
            case Subscribe(wanted):
                # They belong to a stream that the router has given up.
                self._forget_news()
                (self._backend.subscribe if wanted else self._backend.unsubscribe)(self._hear)
            case WatchRequests(wanted):
                self._lost_events = 0
                (self._backend.watch if wanted else self._backend.unwatch)(self._watch)
            case _:
                raise ProtocolError("only a front on the same machine may shut an engine down, or use its files")

    def close(self) -> None:
        """Abort all requests: the router has gone."""
        self._backend.unsubscribe(self._hear)
        self._backend.unwatch(self._watch)
        if self._flushing is not None:
            self._flushing.cancel()
        for stream in self._streams.values():
            if stream is not None:
                self._backend.abort(stream)
        self._streams.clear()
        # A submission that is cancelled is aborted by the backend.
        for task in list(self._tasks):
            task.cancel()

    # requests -------------------------------------------------------------------------------------------------------

    def _submit(self, number: int, request: Request) -> None:
        if number in self._streams:
            log.warning("a router used the request number %d twice; dropping the second request", number)
        elif len(self._streams) >= self._max_open:
            self._send(Replies(refused=[Refusal(number, BUSY, 429)]))
        else:
            self._streams[number] = None
            self._spawn(self._serve(number, request))

    async def _serve(self, number: int, request: Request) -> None:
        try:
            stream = self._streams[number] = await self._backend.submit(request)
            self._send(Replies(accepted=[number]))
            if number in self._ending:
                self._end(number, self._ending.pop(number))
            async for outputs in stream:
                self._take(number, stream, outputs)
        except RequestError as error:
            self._send(Replies(refused=[Refusal.of(number, error)]))
        except EngineStopped as error:
            self._flush()
            self._send(RequestFailed(number, str(error)))
        finally:
            self._streams.pop(number, None)
            self._ending.pop(number, None)

    def _end(self, number: int, stopped: bool) -> None:
        if number not in self._streams:
            return
        stream = self._streams[number]
        if stream is None:
            self._ending[number] = stopped
        else:
            (self._backend.finish if stopped else self._backend.abort)(stream)

    def _take(self, number: int, stream: OutputStream, outputs: list[Output]) -> None:
        for output in outputs:
            output.sequence = number
        if outputs[-1].finish is not None:
            self._reports[number] = stream.report or Report()
        self._outputs += outputs
        if self._flushing is None:
            # All streams that have outputs in this turn of the loop share a frame.
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._outputs:
            event = Outputs(self._outputs, self._reports)
            self._outputs, self._reports = [], {}
            self._send(event)

    # questions and news ---------------------------------------------------------------------------------------------

    def _ask(self, question: Question | Drop) -> None:
        if isinstance(question, Question) and question.topic is Topic.PULSE:
            # A replica that does not serve says so at once: the router then takes its requests elsewhere.
            self._send(Replies(answers={question.number: None if self._backend.healthy else UNWELL}))
        elif self._questions < MAX_QUESTIONS:
            self._questions += 1
            self._spawn(self._answer(question))

    async def _answer(self, question: Question | Drop) -> None:
        try:
            backend = self._backend
            if isinstance(question, Drop):
                answer: Any = await backend.drop(question.tenant, question.prefix)
            elif question.topic is Topic.STATS:
                answer = await backend.stats()
            elif question.topic is Topic.CACHE:
                answer = await backend.cache_report(question.limit)
            elif question.topic is Topic.REQUEST:
                answer = await backend.request_facts(question.name)
            else:
                answer = await backend.flush()
        except EngineStopped:
            return
        finally:
            self._questions -= 1
        self._send(Replies(answers={question.number: answer}))

    def _send_news(self, news: EngineNews) -> None:
        if self._lost_news:
            return
        if self._news and self._news[-1].changes is None:
            # A later report of the load replaces it.
            self._news.pop()
        self._news.append(news)
        self._waiting_changes += 0 if news.changes is None else len(news.changes.keys)
        self._send_waiting_news()
        if self._waiting_changes > MOST_WAITING_CHANGES:
            self._forget_news()
            self._lost_news = True

    def _send_trace(self, batch: TraceBatch | None) -> None:
        """Send what requests do, unless the router is behind. Of an engine that has ended it learns anyway."""
        if batch is None:
            return
        if self._unread() > MAX_UNREAD_NEWS:
            self._lost_events += batch.lost + len(batch.events) + len(batch.steps)
            return
        self._send(msgspec.structs.replace(batch, lost=batch.lost + self._lost_events))
        self._lost_events = 0

    def _send_waiting_news(self) -> None:
        while self._news and self._unread() <= MAX_UNREAD_NEWS:
            news = self._news.popleft()
            self._waiting_changes -= 0 if news.changes is None else len(news.changes.keys)
            self._send(news)

    def _forget_news(self) -> None:
        self._news.clear()
        self._waiting_changes = 0

    def drained(self) -> None:
        """Send news that wait until the router has read; if they were too many, start over."""
        self._send_waiting_news()
        if self._lost_events:
            # Begins anew with what runs.
            self._backend.watch(self._watch)
        if self._lost_news:
            self._lost_news = False
            self._backend.subscribe(self._hear)

    def _send(self, event: Event) -> None:
        self._write(self._writer.event(event))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
