"""Runs an engine for many callers at once: commands in, events out, one thread.

Commands are processed at the borders between steps, so that an abort frees memory within a step. The service steps
while there is work and sleeps while there is none. It knows neither sockets nor texts; `Inbox` and `deliver` are its
two ends.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from weft.base.constraint import Constraint
from weft.base.errors import InvalidField, RequestError
from weft.engine.events import FinishReason, Output, Report
from weft.engine.load import ReplicaLoad
from weft.engine.preparation import OwnCommand, Preparation, PreparedRequest, Wake
from weft.engine.protocol import (
    Command,
    Drop,
    End,
    EngineNews,
    Event,
    LoadPrompt,
    Outputs,
    Question,
    Refusal,
    Refuse,
    Replies,
    SavePrompt,
    Stopped,
    Submit,
    Subscribe,
    Topic,
    WatchRequests,
)
from weft.engine.request import Request, check_token_ids
from weft.engine.tracing.events import Runs
from weft.engine.tracing.tracer import Tracer
from weft.memory.journal import MOST_IN_BATCH, Journal

log = logging.getLogger("weft")

# Hashing the cells of this many tokens takes about ten milliseconds.
TOKENS_PER_BORDER = 1 << 20
# Changes of the cache sent between two steps while there are requests: what a router asks for anew must not delay them.
CHANGES_PER_STEP = 1 << 10
# Interval between two reports of the load, while nothing changes in the cache.
NEWS_SECONDS = 0.02
# Interval between two reports of what requests and steps do, to clients that watch.
TRACE_SECONDS = 0.25
FAILED = "the engine has failed; see its log"
# Not delivered: the caller that aborted a request before it entered the queue has gone.
ENDED = RequestError("the request was aborted before it started")


class Drivable(Protocol):
    """What a service needs from an engine; `weft.engine.loop.Engine` implements it."""

    def constrain(self, request: Request) -> Constraint | None: ...
    def add(self, request: Request, constraint: Constraint | None = None, save_to: Path | None = None) -> int: ...
    def abort(self, number: int) -> None: ...
    def finish(self, number: int) -> None: ...
    def report(self, number: int) -> Report: ...
    def forget(self, number: int) -> None: ...
    def step(self) -> list[Output]: ...
    def flush(self) -> int: ...
    def begin_drop(self, number: int, tenant: bytes | None, prefix: bytes | None) -> None: ...
    def take_dropped(self) -> dict[int, dict[str, Any]]: ...
    def begin_load(self, number: int, path: Path, salt: bytes, share: float) -> None: ...
    def take_loaded(self) -> dict[int, dict[str, Any]]: ...
    def stats(self) -> dict[str, Any]: ...
    def cache_report(self, limit: int) -> dict[str, Any]: ...
    def write_behind(self) -> None: ...
    def load(self) -> ReplicaLoad: ...
    def watch(self, wanted: bool) -> None: ...
    def request_facts(self, name: str) -> list[Runs]: ...
    def take_transfers(self) -> None: ...
    def on_transfers(self, wake: Callable[[], None]) -> None: ...
    def close(self) -> None: ...

    @property
    def journal(self) -> Journal | None: ...

    @property
    def tracer(self) -> Tracer | None: ...

    @property
    def idle(self) -> bool: ...

    @property
    def in_flight(self) -> bool: ...

    @property
    def copying(self) -> bool: ...


class Inbox(Protocol):
    def take(self, wait: bool) -> Iterable[Command | OwnCommand]:
        """Return all available commands; with `wait`, sleep until there is one."""
        ...

    def put(self, command: OwnCommand) -> None:
        """Add a command from a thread of this process."""
        ...


class ThreadInbox:
    """Accepts commands from any thread."""

    def __init__(self) -> None:
        self._commands: deque[Command | OwnCommand] = deque()
        self._arrived = threading.Condition()

    def put(self, command: Command | OwnCommand) -> None:
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def take(self, wait: bool) -> list[Command | OwnCommand]:
        with self._arrived:
            if wait:
                self._arrived.wait_for(lambda: self._commands)
            taken = list(self._commands)
            self._commands.clear()
        return taken


class Service:
    """`deliver` is called from the service's thread with replies before a step and with outputs after it."""

    def __init__(self, engine: Drivable, deliver: Callable[[Event], None], vocab_size: int) -> None:
        self._engine = engine
        self._deliver = deliver
        self._vocab_size = vocab_size
        self._running = True
        # Maps the caller's numbers to the engine's.
        self._sequences: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        # Requests whose grammar is being compiled, and whether they were ended meanwhile.
        self._preparing: dict[int, bool] = {}
        self._preparation: Preparation | None = None
        self._backlog: deque[Command | OwnCommand] = deque()
        self._replies = Replies()
        self._finished: Counter[FinishReason] = Counter()
        self._requests = self._refused = self._tokens_in = self._tokens_out = 0
        self._step_seconds = 0.0
        self._subscribed = False
        self._news_at = self._traced_at = 0.0
        self._reported: ReplicaLoad | None = None

    def run(self, inbox: Inbox) -> bool:
        """Run until a shutdown command and return True; return False if a step failed, after which nothing follows."""
        self._preparation = Preparation(self._engine.constrain, inbox.put)
        self._engine.on_transfers(lambda: inbox.put(Wake()))
        try:
            while self._running:
                if self._engine.idle and not self._backlog:
                    self._engine.write_behind()
                self._publish()
                if (tracer := self._engine.tracer) is not None:
                    self._publish_trace(tracer)
                self._answer_slow()
                self._backlog.extend(inbox.take(wait=self._engine.idle and not self._backlog and not self._unpublished))
                self._handle_some()
                self._reply()
                if self._running and not self._engine.idle:
                    self._step()
            self._engine.close()
        except BaseException:
            # A step is half done, or an invariant is broken: no further result could be trusted.
            log.exception("the engine failed and has stopped")
            self._deliver(Stopped(FAILED))
            return False
        finally:
            self._preparation.end()
        return True

    # commands -------------------------------------------------------------------------------------------------------

    def _handle_some(self) -> None:
        """Handle commands up to a bound on new tokens; the rest waits for the next border, so that rows continue."""
        tokens = 0
        while self._backlog and self._running and tokens < TOKENS_PER_BORDER:
            command = self._backlog.popleft()
            tokens += len(command.request.prompt) if isinstance(command, Submit | SavePrompt) else 0
            self._handle(command)

    def _handle(self, command: Command | OwnCommand) -> None:
        match command:
            case Submit(number, request):
                self._submit(number, request)
            case SavePrompt(number, request, path):
                self._submit(number, request, Path(path))
            case LoadPrompt(number, path, salt, share):
                self._load(number, path, salt, share)
            case PreparedRequest():
                self._take_prepared(command)
            case Wake():
                self._engine.take_transfers()
            case Refuse(number, message, field):
                self._refuse(number, RequestError(message, field=field))
            case End(number, stopped):
                self._end(number, stopped)
            case Subscribe(wanted):
                self._subscribe(wanted)
            case WatchRequests(wanted):
                self._engine.watch(wanted)
            case Question():
                self._replies.answers[command.number] = self._answer(command)
            case Drop(number, tenant, prefix):
                self._land_rest()
                self._engine.begin_drop(number, tenant, prefix)
                # Routers learn of it before the caller does.
                self._publish()
                self._replies.answers |= self._engine.take_dropped()
            case _:
                self._running = False

    def _load(self, number: int, path: str, salt: bytes, share: float) -> None:
        try:
            self._engine.begin_load(number, Path(path), salt, share)
        except RequestError as error:
            self._replies.answers[number] = {"error": str(error), "status": error.status}

    def _submit(self, number: int, request: Request, save_to: Path | None = None) -> None:
        if number in self._sequences or number in self._preparing:
            log.warning("request number %d is already in use; dropping the second request", number)
            return
        try:
            request = checked(request, self._vocab_size)
        except RequestError as error:
            self._refuse(number, error)
            return
        if request.grammar is None:
            self._add(number, request, None, save_to)
        else:
            assert self._preparation is not None, "the service is not running"
            self._preparing[number] = False
            self._preparation.begin(number, request)
            if (tracer := self._engine.tracer) is not None:
                tracer.prepares(request)

    def _take_prepared(self, found: PreparedRequest) -> None:
        ended = self._preparing.pop(found.number)
        if ended or found.error is not None:
            self._refuse(found.number, found.error or ENDED)
            if (tracer := self._engine.tracer) is not None:
                tracer.refused(found.request, ended)
        else:
            self._add(found.number, found.request, found.constraint)

    def _add(self, number: int, request: Request, constraint: Constraint | None, save_to: Path | None = None) -> None:
        more = {} if save_to is None else {"save_to": save_to}
        try:
            sequence = self._engine.add(request, constraint, **more)
        except RequestError as error:
            self._refuse(number, error)
            return
        self._sequences[number], self._numbers[sequence] = sequence, number
        self._replies.accepted.append(number)
        self._requests += 1
        self._tokens_in += len(request.prompt)

    def _refuse(self, number: int, error: RequestError) -> None:
        self._refused += 1
        self._replies.refused.append(Refusal.of(number, error))

    def _end(self, number: int, stopped: bool) -> None:
        if number in self._preparing:
            self._preparing[number] = True
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        if stopped:
            self._engine.finish(sequence)
        else:
            self._engine.abort(sequence)

    def _answer(self, ask: Question) -> Any:
        if ask.topic is Topic.PULSE:
            return None
        if ask.topic is Topic.STATS:
            return self.stats()
        if ask.topic is Topic.CACHE:
            return self._engine.cache_report(ask.limit)
        if ask.topic is Topic.REQUEST:
            return msgspec.to_builtins(self._engine.request_facts(ask.name))
        # Copies hold what they read, too.
        while not self._sequences and (self._engine.in_flight or self._engine.copying):
            self._step()
        return self._engine.flush()

    def _land_rest(self) -> None:
        """Land flights that went one step too far, which still hold the memory that they read."""
        while not self._sequences and self._engine.in_flight:
            self._step()

    def stats(self) -> dict[str, Any]:
        """Return counters since the start and current gauges, by name: the service's own and the engine's."""
        own = {
            "open": len(self._sequences) + len(self._preparing),
            "requests": self._requests,
            "refused": self._refused,
            "finished": {reason.value: self._finished[reason] for reason in FinishReason},
            "aborts": self._finished[FinishReason.ABORT],
            "tokens_in": self._tokens_in,
            "tokens_out": self._tokens_out,
            "step_seconds": self._step_seconds,
        }
        return own | self._engine.stats()

    # news -----------------------------------------------------------------------------------------------------------

    def _subscribe(self, wanted: bool) -> None:
        self._subscribed, self._reported = wanted, None
        journal = self._engine.journal
        if journal is not None:
            journal.restart() if wanted else journal.stop()

    @property
    def _unpublished(self) -> bool:
        journal = self._engine.journal
        return self._subscribed and journal is not None and journal.waiting

    def _publish(self) -> None:
        """Send what changed in the cache, and the load: at intervals, and before the engine sleeps."""
        if not self._subscribed:
            return
        journal, changes = self._engine.journal, None
        if self._unpublished and journal is not None:
            changes = journal.take(MOST_IN_BATCH if self._engine.idle else CHANGES_PER_STEP)
        now = perf_counter()
        if changes is None and now - self._news_at < NEWS_SECONDS and not self._engine.idle:
            return
        load = self._engine.load()
        if changes is not None or load != self._reported:
            self._news_at, self._reported = now, load
            self._deliver(EngineNews(changes, load))

    def _publish_trace(self, tracer: Tracer) -> None:
        """Send what was noted of requests and steps: at intervals, and before the engine sleeps."""
        now = perf_counter()
        if now - self._traced_at >= TRACE_SECONDS or (self._engine.idle and tracer.waiting):
            self._traced_at = now
            for batch in tracer.take():
                self._deliver(batch)

    def _answer_slow(self) -> None:
        """Answer what has ended in the last step: drops whose last byte was overwritten, and files that were read."""
        self._replies.answers |= self._engine.take_dropped() | self._engine.take_loaded()
        self._reply()

    # events ---------------------------------------------------------------------------------------------------------

    def _reply(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, Replies()
            self._deliver(replies)

    def _step(self) -> None:
        began = perf_counter()
        outputs = self._engine.step()
        self._step_seconds += perf_counter() - began
        reports: dict[int, Report] = {}
        for output in outputs:
            sequence = output.sequence
            number = output.sequence = self._numbers[sequence]
            if output.token is not None:
                self._tokens_out += 1
            if output.finish is not None:
                self._finished[output.finish] += 1
                reports[number] = self._engine.report(sequence)
                self._engine.forget(sequence)
                del self._numbers[sequence], self._sequences[number]
        if outputs:
            self._deliver(Outputs(outputs, reports))


def checked(request: Request, vocab_size: int) -> Request:
    """Check that all token ids are in the vocabulary: one that is not would fail the step of all requests."""
    prompt = request.prompt
    for name, ids in (("prompt", prompt), ("answered", request.answered), ("prediction", request.prediction)):
        if ids is not None and len(ids) and not 0 <= int(np.min(ids)) <= int(np.max(ids)) < vocab_size:
            raise InvalidField(name, f"must have token ids from 0 to {vocab_size - 1}, the vocabulary's range")
    check_token_ids(request.params, vocab_size)
    for position in request.snapshots:
        if not 0 < position <= len(prompt):
            raise InvalidField("snapshots", f"must be positions from 1 to the prompt's length, got {position}")
    known = frozenset(token for token in request.stop_tokens if 0 <= token < vocab_size)
    return request if known == request.stop_tokens else replace(request, stop_tokens=known)
