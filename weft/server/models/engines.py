"""Carries out what a residency plans: starts and ends engines, and lets requests wait for them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from weft.base.errors import EngineStopped, RequestError, WeftError
from weft.server.front import Front
from weft.server.models.residency import GrantRequest, LoadModel, NoRoom, RefuseRequest, Residency, Ticket, UnloadModel

log = logging.getLogger("weft.server")

SHUTTING_DOWN = "the server is shutting down"


class NotNow(RequestError):
    """A model is not loaded in time. `retry_seconds` is when a client may ask again."""

    def __init__(self, message: str, retry_seconds: int) -> None:
        super().__init__(message, 503, code="model_not_loaded")
        self.retry_seconds = retry_seconds


class LoadedModel(Protocol):
    """An engine, and what answers the requests for its model."""

    @property
    def front(self) -> Front: ...

    async def wait_failed(self) -> str:
        """Wait until the engine has ended on its own; return why."""
        ...

    async def close(self, drain_seconds: float) -> None:
        """Let running requests finish for this long, then end the engine."""


class ModelLease:
    """A request's place: it waits for its model, and then keeps it loaded until it is released."""

    def __init__(self, engines: ModelEngines, ticket: Ticket, ready: asyncio.Future[LoadedModel]) -> None:
        self._engines = engines
        self._ticket = ticket
        self._ready = ready

    async def loaded(self) -> LoadedModel:
        """Wait for the model. Raises `NotNow`, or `EngineStopped` when the server ends."""
        # A request may give up and wait again.
        return await asyncio.shield(self._ready)

    def release(self) -> None:
        """End the request; further calls do nothing."""
        self._engines.leave(self._ticket)


class Timer(Protocol):
    def cancel(self) -> None: ...


class ModelEngines:
    """`make` loads a model by its name. Everything here runs in the event loop's thread.

    `call_at` calls a function at a time of the residency's clock; without one, that is the event loop's.
    """

    def __init__(
        self,
        residency: Residency,
        make: Callable[[str], Awaitable[LoadedModel]],
        call_at: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self.residency = residency
        self._make = make
        self._call_at = call_at or asyncio.get_running_loop().call_at
        self._ready: dict[Ticket, asyncio.Future[LoadedModel]] = {}
        self._loaded: dict[str, LoadedModel] = {}
        # Loads and watches, which end with the server; unloads, which are waited for.
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None
        self._closed = False

    @property
    def open(self) -> int:
        """Number of requests that run or wait."""
        return len(self._ready)

    @property
    def accepting(self) -> bool:
        """Whether the server takes requests, which it does until it ends."""
        return not self._closed

    def find(self, name: str) -> LoadedModel | None:
        """Return a model if it is loaded."""
        return self._loaded.get(name)

    def enter(self, name: str, patient: bool = False) -> ModelLease:
        """Return a place for a request; the model is loaded if it is not. Raises `NotNow` if too many wait.

        A `patient` request waits until models have no others.
        """
        if self._closed:
            raise EngineStopped(SHUTTING_DOWN)
        try:
            ticket = self.residency.enter(name, patient)
        except NoRoom as error:
            raise NotNow(f"{error}; try again later", error.retry_seconds) from None
        ready: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        # A request may leave before its model fails to load.
        ready.add_done_callback(lambda each: each.cancelled() or each.exception())
        self._ready[ticket] = ready
        self.advance()
        return ModelLease(self, ticket, ready)

    def leave(self, ticket: Ticket) -> None:
        ready = self._ready.pop(ticket, None)
        if ready is not None:
            ready.cancel()
            self.residency.leave(ticket)
            self.advance()

    # orders -----------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do what is due now, and come back when more may be."""
        if self._closed:
            return
        for order in self.residency.plan():
            match order:
                case LoadModel(name):
                    begin(self._load(name), self._tasks)
                case UnloadModel(name):
                    begin(self._unload(name, self._loaded.pop(name)), self._endings)
                case GrantRequest(ticket):
                    self._ready[ticket].set_result(self._loaded[ticket.model])
                case RefuseRequest(ticket, reason, retry_seconds):
                    self._ready[ticket].set_exception(NotNow(reason, retry_seconds))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self.residency.wakes_at()
        self._timer = None if at == math.inf else self._call_at(at, self.advance)

    async def _load(self, name: str) -> None:
        log.info("loading model %s", name)
        try:
            loaded = await self._make(name)
        except WeftError as error:
            log.error("model %s cannot be loaded: %s", name, str(error).replace("\n", " "))
            self.residency.note_failed(name)
        except Exception:
            log.exception("model %s cannot be loaded", name)
            self.residency.note_failed(name)
        else:
            self._loaded[name] = loaded
            self.residency.note_loaded(name)
            begin(self._watch(name, loaded), self._tasks)
            log.info("loaded model %s", name)
        self.advance()

    async def _unload(self, name: str, loaded: LoadedModel) -> None:
        await self._end(name, loaded)
        log.info("unloaded model %s", name)
        self.residency.note_unloaded(name)
        self.advance()

    async def _watch(self, name: str, loaded: LoadedModel) -> None:
        reason = await loaded.wait_failed()
        # A model that is being unloaded ends too.
        if self._loaded.get(name) is not loaded:
            return
        del self._loaded[name]
        log.error("the engine of model %s has ended: %s; the next request loads it again", name, reason)
        self.residency.note_ended(name)
        self.advance()
        await self._end(name, loaded)

    async def _end(self, name: str, loaded: LoadedModel) -> None:
        try:
            await loaded.close(0)
        except Exception:
            log.exception("model %s was not unloaded cleanly", name)

    # the server's life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start nothing: a model is loaded for its first request."""

    async def wait_failed(self) -> str:
        """Wait for ever: an engine that ends is loaded again."""
        forever: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await forever

    async def stop(self, drain_seconds: float) -> None:
        """Accept no more requests, let running ones finish for this long, and end all engines."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for ready in self._ready.values():
            if not ready.done():
                ready.set_exception(EngineStopped(SHUTTING_DOWN))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._endings, return_exceptions=True)
        await asyncio.gather(*(each.close(drain_seconds) for each in self._loaded.values()))
        self._loaded.clear()


def begin(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Run work as one of these tasks."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
