"""The HTTP application of a server with several models: the routes of one, each handed to the model it is for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.access.auth import Keys
from weft.server.access_log import AccessLog
from weft.server.apis import cache_report, control, docs_page, stored_responses
from weft.server.apis.llama_cpp import about
from weft.server.apis.ollama import models as ollama_models
from weft.server.app import ROUTES, Background, batching, common_routes, no_batches, protected
from weft.server.batches.job import Call
from weft.server.batches.lines import ENDPOINTS
from weft.server.batches.runner import BatchRunner
from weft.server.batches.store import BatchStore
from weft.server.front import Front
from weft.server.http.connections import Connections
from weft.server.metrics import registry
from weft.server.metrics.connections import ConnectionCollector
from weft.server.metrics.keys import KeyCollector
from weft.server.metrics.models import (
    COUNTS,
    HttpCollector,
    LabelledCollector,
    ModelCollector,
    ModelCounts,
    registry_of,
)
from weft.server.metrics.registry import Metrics
from weft.server.metrics.stored import StoredCollector
from weft.server.models.catalogue import Catalogue
from weft.server.models.dispatch import Dispatch
from weft.server.models.engines import ModelEngines
from weft.server.models.lists import ModelLists
from weft.server.models.residency import ModelState
from weft.server.tracing import routes as tracing

# Need no model.
COMMON: tuple[Callable[..., Any], ...] = (
    control.version,
    docs_page.docs,
    ollama_models.version,
    ollama_models.unchanged,
    stored_responses.show,
    stored_responses.delete,
    stored_responses.input_items,
)
# Show the engine that is there, and load none.
SHOWN: tuple[Callable[..., Any], ...] = (control.model_info, about.props, about.slots, tracing.events, tracing.show)
# Sequences of batches at work at once.
BATCH_WIDTH = 32


def create_models_app(
    engines: ModelEngines,
    catalogue: Catalogue,
    now: Callable[[], float],
    *,
    keys: Keys,
    connections: Connections | None = None,
    batch_store: BatchStore | None = None,
    background: list[Background] | None = None,
) -> AccessLog:
    """Return the app for engines that the caller starts and stops. `now` is the clock of the residency."""
    settings = catalogue.settings
    dispatch = Dispatch(engines, catalogue, settings.keep_alive_seconds)
    kept, batches = cache_report.Kept(catalogue.stored), no_batches()
    if batch_store is not None:
        calls: dict[str, Call] = {
            path: partial(dispatch.call, endpoint) for path, _, endpoint in ROUTES if path in ENDPOINTS
        }
        runner = BatchRunner(batch_store, keys, calls, settings.limits, BATCH_WIDTH)
        kept = cache_report.Kept(catalogue.stored, runner.drop)
        batches = batching(runner, catalogue.receiving, background)
    lists = ModelLists(engines, catalogue, keys, now, kept).routes()
    routes = lists + dispatched(dispatch, catalogue, lists) + cache_routes(dispatch, keys) + batches
    counted = Metrics()
    routes += metrics_routes(engines, catalogue, counted, keys, connections)
    routes += common_routes(catalogue, keys, settings)
    return protected(routes, settings, keys, counted)


def dispatched(dispatch: Dispatch, catalogue: Catalogue, others: list[Route]) -> list[Route]:
    """Return the routes of one model, without the `others`, which are about all models."""
    known = {(route.path, method) for route in others for method in route.methods or ()}
    found = []
    for path, method, endpoint in ROUTES:
        if (path, method) in known:
            continue
        handler: Callable[[Request], Awaitable[Any]] = partial(dispatch.answer, endpoint)
        if endpoint in COMMON:
            handler = partial(endpoint, catalogue)  # type: ignore[arg-type]
        elif endpoint in SHOWN:
            handler = partial(dispatch.show, endpoint)
        found.append(Route(path, handler, methods=[method]))
    return found


def cache_routes(dispatch: Dispatch, keys: Keys) -> list[Route]:
    """Return the routes that show the cache of one model, which the query names."""
    outlines: WeakKeyDictionary[Front, Any] = WeakKeyDictionary()

    async def report(front: Front, request: Request) -> Response:
        answer: Response = await cache_report.routes(front.backend, keys)[0].endpoint(request)
        return answer

    async def outline(front: Front, request: Request) -> Response:
        if front not in outlines:
            outlines[front] = cache_report.outline_routes(front.backend)[0].endpoint
        answer: Response = await outlines[front](request)
        return answer

    async def show(request: Request) -> Response:
        control.need_admin(request)
        return await dispatch.show(report, request)

    return [
        Route("/cache", show, methods=["GET"]),
        Route("/cache/outline", partial(dispatch.show, outline), methods=["GET"]),
    ]


def metrics_routes(
    engines: ModelEngines, catalogue: Catalogue, counted: Metrics, keys: Keys, connections: Connections | None
) -> list[Route]:
    """Return the route of the metrics of all models."""
    metrics = {name: entry.metrics for name, entry in catalogue.entries.items()}

    def read() -> dict[str, ModelCounts]:
        return {
            name: ModelCounts(
                each.state, len(each.running), len(each.waiting), {key: getattr(each, key) for key in COUNTS}
            )
            for name, each in engines.residency.models.items()
        }

    labelled = LabelledCollector(metrics, lambda name: engines.find(name) is not None, catalogue.settings.vllm_metrics)
    parts = [labelled, ModelCollector(ModelState, read), HttpCollector(counted), KeyCollector(keys)]
    parts += [] if connections is None else [ConnectionCollector(connections)]
    parts += [] if catalogue.stored is None else [StoredCollector(catalogue.stored)]
    whole = registry_of(*parts)

    async def render(accept: str) -> Response:
        for name, each in metrics.items():
            loaded = engines.find(name)
            if loaded is not None:
                await each.engine.refresh(loaded.front.backend)
        return registry.rendered(whole, accept)

    async def show(request: Request) -> Response:
        control.need_admin(request)
        return await render(request.headers.get("accept", ""))

    return [Route("/metrics", show, methods=["GET"])]
