"""Hands each request to its model: reads its name, waits until the model is loaded, and keeps it loaded meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.base.errors import RequestError
from weft.server.apis.ollama.answers import nothing
from weft.server.front import Front
from weft.server.http.errors import json_response
from weft.server.http.sse import while_connected
from weft.server.models.asked import KINDS, ModelFields, again, asked_of, keep_alive_of, only_unloads, streams, text_of
from weft.server.models.catalogue import Catalogue, not_loaded
from weft.server.models.early import EarlyStream, form_of
from weft.server.models.engines import LoadedModel, ModelEngines, ModelLease
from weft.server.texts.bodies import decode

Endpoint = Callable[[Front, Request], Awaitable[Response]]
SHOW, FORK = "/api/show", "/v1/fork"
TOO_MUCH = "too many bytes of requests wait for their models; try again later"


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request with its body, the model that it is for, and what it says of the model's time after it."""

    endpoint: Endpoint
    request: Request
    data: bytes
    asked: ModelFields
    model: str
    hint: float | None


class Held:
    """A response whose model stays loaded until it is sent."""

    def __init__(self, response: ASGIApp, release: Callable[[], None]) -> None:
        self._response = response
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._release()


class Dispatch:
    """`patience_seconds` is how long a stream stays silent before it begins without its model; 0: for ever."""

    def __init__(self, engines: ModelEngines, catalogue: Catalogue, patience_seconds: float) -> None:
        self._engines = engines
        self._catalogue = catalogue
        self._patience = patience_seconds or None
        # Bytes of the bodies that wait.
        self.held_bytes = 0

    # routes -----------------------------------------------------------------------------------------------------------

    async def answer(self, endpoint: Endpoint, request: Request) -> ASGIApp:
        """Answer a request whose model is loaded for it."""
        call = await self._read(endpoint, request)
        path: str = request.scope["path"]
        if only_unloads(call.asked, path):
            self._hint(call)
            return json_response(nothing(call.model, decode(call.data, KINDS[path], self._catalogue.limits)))
        lease = self._enter(call)
        try:
            if streams(call.asked, path) and not await self._is_ready(call, lease):
                assert self._patience is not None
                form = form_of(path, call.model)
                return EarlyStream(partial(self._answered, call, lease), lease.release, form, self._patience)
            await self._counted(call, while_connected(request, lease.loaded()))
            return Held(await self._answered(call, lease), lease.release)
        except BaseException:
            lease.release()
            raise

    async def call(self, endpoint: Endpoint, request: Request) -> Response:
        """Return the answer to a line of a batch, which is whole when it is returned."""
        call = await self._read(endpoint, request)
        lease = self._enter(call, patient=True)
        try:
            return await self._answered(call, lease)
        finally:
            lease.release()

    async def show(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer a request about an engine, which is not loaded for it. The query names the model."""
        name = self._catalogue.named(request.query_params.get("model"))
        loaded = self._engines.find(name)
        if loaded is None:
            raise not_loaded(name)
        return await endpoint(loaded.front, request)

    # steps ------------------------------------------------------------------------------------------------------------

    async def _read(self, endpoint: Endpoint, request: Request) -> ModelCall:
        named = request.query_params.get("model")
        if request.method == "GET":
            return ModelCall(endpoint, request, b"", ModelFields(), self._catalogue.named(named), None)
        data = await self._catalogue.receiving.read_body(request)
        asked = asked_of(data, self._catalogue.limits)
        name, path = asked.model or named, request.scope["path"]
        if path == SHOW:
            name = name or text_of(asked.name)
        if path == FORK:
            name = name or self._model_of(text_of(asked.id) or "", request)
        return ModelCall(endpoint, request, data, asked, self._catalogue.named(name), keep_alive_of(asked, path))

    def _model_of(self, answer: str, request: Request) -> str | None:
        """Return the model of an answer that runs or is stored."""
        tenant, stored = request.state.tenant, self._catalogue.stored
        for name in self._catalogue.entries:
            loaded = self._engines.find(name)
            if loaded is not None and any(
                answer in each.names and each.tenant == tenant for each in loaded.front.generations
            ):
                return name
        if stored is None:
            return None
        with suppress(RequestError):
            found = stored.find(answer, tenant).model
            return found if found in self._catalogue.entries else None
        return None

    def _enter(self, call: ModelCall, patient: bool = False) -> ModelLease:
        most, size = self._catalogue.limits.waiting_bytes, len(call.data)
        if self._engines.find(call.model) is None and self.held_bytes and self.held_bytes + size > most:
            raise RequestError(TOO_MUCH, 503)
        return self._engines.enter(call.model, patient)

    async def _is_ready(self, call: ModelCall, lease: ModelLease) -> bool:
        """Wait for a model as long as a stream may be silent; return whether it is loaded."""
        try:
            async with asyncio.timeout(self._patience):
                await self._counted(call, while_connected(call.request, lease.loaded()))
        except TimeoutError:
            return False
        return True

    async def _answered(self, call: ModelCall, lease: ModelLease, receive: Receive | None = None) -> Response:
        loaded = await self._counted(call, lease.loaded())
        self._hint(call)
        return await call.endpoint(loaded.front, again(call.request, call.data, receive))

    async def _counted(self, call: ModelCall, waiting: Coroutine[Any, Any, LoadedModel]) -> LoadedModel:
        """Count a body while it waits for its model."""
        self.held_bytes += len(call.data)
        try:
            return await waiting
        finally:
            self.held_bytes -= len(call.data)

    def _hint(self, call: ModelCall) -> None:
        if call.hint is not None and self._engines.find(call.model) is not None:
            self._engines.residency.hint(call.model, None if call.hint == math.inf else call.hint)
            self._engines.advance()
