"""The HTTP application: maps paths to handlers. `guard.py` and `access_log.py` wrap it, for all paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from time import perf_counter

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.backends.backend import Backend, PromptFiles
from weft.base.errors import RequestError, WeftError
from weft.base.sampling import SamplingParams
from weft.server.access.auth import Keys
from weft.server.access.guard import Guard
from weft.server.access.rates import RATE_HEADERS
from weft.server.access_log import REQUEST_ID, AccessLog
from weft.server.apis import (
    anthropic_route,
    cache_report,
    control,
    docs_page,
    fork,
    lm_studio,
    native,
    openai_chat,
    openai_completions,
    openai_responses,
    stored_responses,
    tokens,
    usage,
)
from weft.server.apis.llama_cpp import about as llama_about
from weft.server.apis.llama_cpp import completion as llama_completion
from weft.server.apis.ollama import models as ollama_models
from weft.server.apis.ollama import routes as ollama
from weft.server.apis.openapi import document
from weft.server.apis.vectors import routes as vectors
from weft.server.batches.lines import ENDPOINTS
from weft.server.batches.routes import BatchRoutes
from weft.server.batches.runner import BatchRunner
from weft.server.batches.store import BatchStore
from weft.server.front import Front, ServerSide
from weft.server.http.connections import Connections
from weft.server.http.errors import json_response, response
from weft.server.http.receiving import Receiving
from weft.server.metrics import registry as metrics
from weft.server.metrics.connections import ConnectionCollector
from weft.server.metrics.keys import KeyCollector
from weft.server.metrics.registry import Metrics
from weft.server.metrics.stored import StoredCollector
from weft.server.metrics.vllm import VllmCollector
from weft.server.page import routes as page_routes
from weft.server.prefixes.routes import PrefixRoutes
from weft.server.settings import ServerSettings
from weft.server.stored.answers import StoredAnswers
from weft.server.texts.pool import TextPool
from weft.server.tracing import routes as tracing
from weft.server.tracing.spans import send_to
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer

Endpoint = Callable[[Front, Request], Awaitable[Response]]
Background = Callable[[], AbstractAsyncContextManager[None]]

# path, method, handler
ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("/v1/models", "GET", control.models),
    ("/v1/models/{name:path}", "GET", control.model),
    ("/v1/completions", "POST", openai_completions.complete),
    ("/v1/chat/completions", "POST", openai_chat.chat),
    ("/v1/responses", "POST", openai_responses.respond),
    ("/v1/responses/{name}", "GET", stored_responses.show),
    ("/v1/responses/{name}", "DELETE", stored_responses.delete),
    ("/v1/responses/{name}/input_items", "GET", stored_responses.input_items),
    ("/v1/fork", "POST", fork.fork),
    ("/v1/messages", "POST", anthropic_route.messages),
    ("/v1/messages/count_tokens", "POST", anthropic_route.count_tokens),
    ("/v1/embeddings", "POST", vectors.embed),
    *((path, "POST", vectors.score) for path in ("/v1/score", "/score")),
    *((path, "POST", vectors.rerank) for path in ("/v1/rerank", "/rerank")),
    ("/v2/rerank", "POST", vectors.rerank_v2),
    ("/classify", "POST", vectors.classify),
    ("/api/embed", "POST", vectors.ollama_embed),
    ("/api/embeddings", "POST", vectors.ollama_embedding),
    ("/tokenize", "POST", tokens.tokenize),
    ("/detokenize", "POST", tokens.detokenize),
    ("/generate", "POST", native.generate),
    ("/api/chat", "POST", ollama.chat),
    ("/api/generate", "POST", ollama.generate),
    ("/api/tags", "GET", ollama_models.tags),
    ("/api/ps", "GET", ollama_models.running),
    ("/api/show", "POST", ollama_models.show),
    ("/api/version", "GET", ollama_models.version),
    *((f"/api/{name}", "POST", ollama_models.unchanged) for name in ("pull", "push", "create", "copy")),
    ("/api/delete", "DELETE", ollama_models.unchanged),
    ("/api/v0/models", "GET", lm_studio.models),
    ("/api/v0/models/{name:path}", "GET", lm_studio.model),
    ("/api/v0/chat/completions", "POST", openai_chat.chat),
    ("/api/v0/completions", "POST", openai_completions.complete),
    ("/api/v0/embeddings", "POST", vectors.embed),
    ("/completion", "POST", llama_completion.complete),
    ("/completions", "POST", llama_completion.complete),
    ("/infill", "POST", llama_completion.infill),
    ("/props", "GET", llama_about.props),
    ("/slots", "GET", llama_about.slots),
    ("/abort_request", "POST", control.abort_request),
    ("/flush_cache", "POST", control.flush_cache),
    ("/server_info", "GET", control.server_info),
    ("/get_server_info", "GET", control.server_info),
    ("/model_info", "GET", control.model_info),
    ("/get_model_info", "GET", control.model_info),
    ("/health", "GET", control.health),
    ("/health_generate", "GET", control.health_generate),
    ("/ping", "GET", control.health),
    ("/ping", "POST", control.health),
    ("/version", "GET", control.version),
    ("/docs", "GET", docs_page.docs),
    ("/load", "GET", control.load),
    ("/debug/events", "GET", tracing.events),
    ("/debug/requests/{name:path}", "GET", tracing.show),
)


def create_app(
    backend: Backend,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    end_tokens: frozenset[int],
    settings: ServerSettings,
    suggested: SamplingParams | None = None,
    *,
    pool: TextPool | None = None,
    keys: Keys | None = None,
    connections: Connections | None = None,
    batch_store: BatchStore | None = None,
    background: list[Background] | None = None,
    stored: StoredAnswers | None = None,
    files: PromptFiles | None = None,
) -> AccessLog:
    """Return the app for a backend that the caller starts and stops.

    With a `batch_store`, the app runs batches; what must run beside the server is added to `background`.

    `suggested` are the sampling parameters of requests that set none; `pool` reads large bodies. `keys` defaults to
    those of the settings; a caller may replace them later. The metrics include `connections`. The caller opens and
    closes the `stored` answers. `files` is the backend, if its engine reaches files of this process.
    """
    keys = keys or Keys(settings)
    front = Front(backend, tokenizer, template, end_tokens, settings, suggested, pool, stored)
    if connections is not None:
        front.metrics.registry.register(ConnectionCollector(connections))
    routes = [Route(path, bound(front, endpoint), methods=[method]) for path, method, endpoint in ROUTES]
    kept = cache_report.Kept(stored)
    if batch_store is None:
        routes += no_batches()
    else:
        runner = BatchRunner(batch_store, keys, calls_of(front), front.limits, front.backend.info.max_sequences // 2)
        routes += batching(runner, front.receiving, background)
        kept = cache_report.Kept(stored, runner.drop)
    routes += cache_report.outline_routes(front.backend)
    routes += PrefixRoutes(front, keys, files).routes()
    routes += admin_only(cache_report.routes(front.backend, keys, kept, front.retained))
    routes += admin_only(metrics.routes(lambda accept: front.metrics.render(front.backend, accept)))
    routes += common_routes(front, keys, settings)
    front.metrics.registry.register(KeyCollector(keys))
    if stored is not None:
        front.metrics.registry.register(StoredCollector(stored))
    if settings.vllm_metrics:
        front.metrics.registry.register(VllmCollector(front.metrics, lambda: front.model_name))
    return protected(routes, settings, keys, front.metrics)


def protected(routes: list[Route], settings: ServerSettings, keys: Keys, counted: Metrics) -> AccessLog:
    """Return the routes behind keys and bounds, with a line of the log, a count and a span for every response."""
    handlers = dict.fromkeys((WeftError, HTTPException, Exception), _failed)
    inner = Starlette(routes=routes, exception_handlers=handlers)
    app: ASGIApp = Guard(inner, settings, keys)
    if settings.cors_origins:
        # Outside the guard: a browser asks for permission before it sends its key.
        app = with_cors(app, settings.cors_origins)
    endpoint = settings.otlp_traces_endpoint
    spans = None if endpoint is None else send_to(endpoint, perf_counter)
    return AccessLog(app, routes, counted, settings.log_requests, perf_counter, spans)


def common_routes(side: ServerSide, keys: Keys, settings: ServerSettings) -> list[Route]:
    """Return the routes that need no model: the OpenAPI document, usage, and the page."""

    async def openapi(request: Request) -> Response:
        return json_response(document(side.model_name))

    routes = [Route("/openapi.json", openapi, methods=["GET"]), *admin_only(usage.routes(keys.usage))]
    return [*routes, *page_routes()] if settings.page else routes


def batching(runner: BatchRunner, receiving: Receiving, background: list[Background] | None) -> list[Route]:
    """Return the routes of files and batches, whose lines are answered by the routes of this server."""
    if background is not None:
        background.append(runner.running)
    return BatchRoutes(runner, receiving, receiving.limits).routes()


def calls_of(front: Front) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return what answers the lines of batches, by path."""
    return {path: bound(front, endpoint) for path, _, endpoint in ROUTES if path in ENDPOINTS}


def no_batches() -> list[Route]:
    """Return routes that say how to get batches."""

    async def missing(request: Request) -> Response:
        raise RequestError("this server keeps no files and batches; start it with --batch-folder FOLDER", 404)

    return [Route(path, missing, methods=["GET", "POST"]) for path in ("/v1/files", "/v1/batches")]


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    shown = [REQUEST_ID.decode(), "retry-after", *RATE_HEADERS]
    methods = ["GET", "POST", "DELETE"]
    return CORSMiddleware(
        app, allow_origins=list(origins), allow_methods=methods, allow_headers=["*"], expose_headers=shown
    )


def bound(front: Front, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    return partial(endpoint, front)


def admin_only(routes: list[Route]) -> list[Route]:
    """Return routes that need the admin key if there are several keys."""

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            control.need_admin(request)
            return await endpoint(request)

        return show

    return [Route(each.path, guarded(each.endpoint), methods=list(each.methods or ())) for each in routes]


async def _failed(request: Request, error: Exception) -> Response:
    request.state.record.note(error)
    # Weft's own errors have other types, so these statuses come from the router.
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        asked = f"{request.method:.16} {request.scope['path']:.80}"
        error = HTTPException(error.status_code, f"{asked} does not exist", error.headers)
    return response(error, request.scope["path"])
