"""Routes about all models of a server: lists in the forms of several APIs, facts, and an admin's orders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft import __version__
from weft.base.errors import InvalidField, RequestError
from weft.server.access.auth import Keys
from weft.server.apis import cache_report, control
from weft.server.apis.ollama import models as ollama
from weft.server.http.errors import json_response
from weft.server.models.catalogue import Catalogue, ListedModel, not_loaded
from weft.server.models.engines import LoadedModel, ModelEngines
from weft.server.models.residency import Busy, ModelState, Residence
from weft.server.texts.bodies import read

Object = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
ALWAYS = timedelta(days=365)


class ModelOrder(msgspec.Struct, kw_only=True):
    """What an admin orders. `force` ends running requests."""

    model: str
    force: bool = False


class ModelLists:
    """Handlers of the routes; `now` is the clock of the residency. `kept` is dropped with prefixes of all models."""

    def __init__(
        self,
        engines: ModelEngines,
        catalogue: Catalogue,
        keys: Keys,
        now: Callable[[], float],
        kept: cache_report.Kept,
    ) -> None:
        self._engines = engines
        self._catalogue = catalogue
        self._keys = keys
        self._now = now
        self._kept = kept

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/api/v0/models", "GET", self.lm_studio_models),
            ("/api/v0/models/{name:path}", "GET", self.lm_studio_model),
            ("/api/tags", "GET", self.tags),
            ("/api/ps", "GET", self.running),
            ("/health", "GET", self.health),
            ("/ping", "GET", self.health),
            ("/ping", "POST", self.health),
            ("/server_info", "GET", self.server_info),
            ("/get_server_info", "GET", self.server_info),
            ("/load", "GET", self.load),
            ("/abort_request", "POST", self.abort),
            ("/flush_cache", "POST", self.flush),
            ("/cache", "DELETE", self.drop),
            ("/models/load", "POST", self.load_model),
            ("/models/unload", "POST", self.unload_model),
        ]
        return [Route(path, handler, methods=[method]) for path, method, handler in table]

    def _all(self) -> list[tuple[ListedModel, Residence]]:
        return [(entry, self._engines.residency.models[name]) for name, entry in self._catalogue.entries.items()]

    def _one(self, request: Request) -> tuple[ListedModel, Residence]:
        name = self._catalogue.named(request.path_params["name"])
        return self._catalogue.entries[name], self._engines.residency.models[name]

    # lists ------------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [card(*each) for each in self._all()]})

    async def model(self, request: Request) -> Response:
        return json_response(card(*self._one(request)))

    async def lm_studio_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [lm_studio_card(*each) for each in self._all()]})

    async def lm_studio_model(self, request: Request) -> Response:
        return json_response(lm_studio_card(*self._one(request)))

    async def tags(self, request: Request) -> Response:
        return json_response({"models": [ollama_card(entry) for entry, _ in self._all()]})

    async def running(self, request: Request) -> Response:
        return json_response(
            {"models": [self._running(*each) for each in self._all() if each[1].state is ModelState.LOADED]}
        )

    def _running(self, entry: ListedModel, model: Residence) -> Object:
        found = ollama_card(entry)
        # A model that is in use has the whole time before it.
        kept = model.keep_alive_seconds
        left = (
            ALWAYS if kept is None else timedelta(seconds=kept if model.busy else max(0, model.expires - self._now()))
        )
        expires = ollama.NEVER if kept is None else (datetime.now(UTC) + left).isoformat().replace("+00:00", "Z")
        return found | {"expires_at": expires, "size_vram": found["size"]} | entry.cards.get("running", {})

    # facts ------------------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Report whether the server is up, whatever its engines do: one that ends is loaded again."""
        return json_response({"status": "ok"}) if self._engines.accepting else json_response({"status": "down"}, 503)

    async def server_info(self, request: Request) -> Response:
        control.need_admin(request)
        name = request.query_params.get("model")
        if name is not None:
            return await control.server_info(self._need(self._catalogue.named(name)).front, request)
        residency = self._engines.residency
        found = [facts(entry, model) for entry, model in self._all()]
        budget = {"budget": residency.rules.budget, "held": residency.held, "waiting": residency.waiting}
        return json_response({"version": __version__, "models": found, **budget})

    def _need(self, name: str) -> LoadedModel:
        loaded = self._engines.find(name)
        if loaded is None:
            raise not_loaded(name)
        return loaded

    async def load(self, request: Request) -> Response:
        control.need_admin(request)
        return json_response({"server_load": self._engines.open})

    # orders -----------------------------------------------------------------------------------------------------------

    async def abort(self, request: Request) -> Response:
        body = await read(request, control.AbortRequest, self._catalogue.receiving)
        if body.rid is None and not body.abort_all:
            raise InvalidField("rid", "or abort_all must be given")
        names = None if body.abort_all else [body.rid] if isinstance(body.rid, str) else body.rid
        aborted = sum(each.front.abort(names, request.state.tenant) for _, each in self._loaded())
        return json_response(control.AbortAnswer(aborted=aborted))

    async def flush(self, request: Request) -> Response:
        """Flush the model that the query names, or all that are loaded."""
        control.need_admin(request)
        left = await asyncio.gather(*(each.front.backend.flush() for _, each in self._chosen(request)))
        return json_response(control.FlushAnswer(cached_tokens=sum(left)))

    async def drop(self, request: Request) -> Response:
        """Drop prefixes of the model that the query names, or of all that are loaded; name those that are not.

        What the server keeps of a tenant is of all models, and goes with any of them.
        """
        control.need_admin(request)
        found: Object = {}
        chosen = self._chosen(request)
        more = await self._kept.drop_as(request, self._keys)
        for name, loaded in chosen:
            route = cache_report.routes(loaded.front.backend, self._keys, None, loaded.front.retained)[1]
            answer: Response = await route.endpoint(request)
            found[name] = msgspec.json.decode(answer.body)
        whole = all(each.get("erased", True) for each in (more, *found.values()))
        idle = [name for name in self._catalogue.entries if self._engines.find(name) is None]
        return cache_report.answer({"models": found, "not_loaded": idle} | more, 200 if whole else 500)

    def _loaded(self) -> list[tuple[str, LoadedModel]]:
        found = ((name, self._engines.find(name)) for name in self._catalogue.entries)
        return [(name, each) for name, each in found if each is not None]

    def _chosen(self, request: Request) -> list[tuple[str, LoadedModel]]:
        asked = request.query_params.get("model")
        if asked is None:
            return self._loaded()
        name = self._catalogue.named(asked)
        return [(name, self._need(name))]

    async def load_model(self, request: Request) -> Response:
        """Load a model before its first request, and return when it is loaded."""
        control.need_admin(request)
        body = await read(request, ModelOrder, self._catalogue.receiving)
        name = self._catalogue.named(body.model)
        lease = self._engines.enter(name)
        try:
            await lease.loaded()
        finally:
            lease.release()
        return json_response({"success": True, "model": name, "state": self._engines.residency.models[name].state})

    async def unload_model(self, request: Request) -> Response:
        """Unload a model now; a model with requests only if forced, which ends them."""
        control.need_admin(request)
        body = await read(request, ModelOrder, self._catalogue.receiving)
        name = self._catalogue.named(body.model)
        try:
            self._engines.residency.order_unload(name, body.force)
        except Busy as error:
            raise RequestError(f"model {name!r} {error}", 409, code="model_busy") from None
        self._engines.advance()
        return json_response({"success": True, "model": name, "state": self._engines.residency.models[name].state})


def card(entry: ListedModel, model: Residence) -> Object:
    """Return a model in OpenAI's form. What only an engine knows appears after the first load."""
    own = {"id": entry.name, "object": "model", "created": control.CREATED, "owned_by": "weft", "root": entry.name}
    names = {"aliases": entry.aliases} if entry.aliases else {}
    return own | entry.cards.get("openai", {}) | names | {"state": model.state}


def lm_studio_card(entry: ListedModel, model: Residence) -> Object:
    own = {"id": entry.name, "object": "model", "type": "llm", "publisher": "weft"}
    state = "loaded" if model.state is ModelState.LOADED else "not-loaded"
    return own | entry.cards.get("lm_studio", {}) | {"state": state}


def ollama_card(entry: ListedModel) -> Object:
    own = {
        "name": entry.name,
        "model": entry.name,
        "modified_at": ollama.modified(),
        "size": entry.weights_bytes,
        "digest": sha256(entry.name.encode()).hexdigest(),
        "details": {"parent_model": "", "format": "weft", "family": "", "families": [], "quantization_level": ""},
    }
    return own | entry.cards.get("ollama", {})


def facts(entry: ListedModel, model: Residence) -> Object:
    return {
        "id": entry.name,
        "state": model.state,
        "cost": model.cost,
        "running": len(model.running),
        "waiting": len(model.waiting),
        "loads": model.loads,
        "failed_loads": model.failed_loads,
        "unloads": model.unloads,
        "crashes": model.crashes,
        "keep_alive_seconds": model.keep_alive_seconds,
    }
