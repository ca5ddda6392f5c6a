"""Errors as clients see them: a status, a message and the field at fault, without internal details.

The body is OpenAI's error object, or Anthropic's on the routes of its API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from weft.base.errors import EngineStopped, RequestError

log = logging.getLogger("weft.server")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "busy", 431: "headers_too_large", 503: "unavailable"}
# nginx's status for clients that disconnect before their response.
GONE = 499
STOPPED = "the engine has stopped or is stopping; try again later"
# Maximum characters of a message: errors quote client text.
MAX_MESSAGE = 2000
INTERNAL = "internal error; see the server's log"


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Body of every 4xx and 5xx."""

    error: ErrorBody


def describe(error: Exception) -> tuple[int, ErrorAnswer]:
    """Return the status and body of an error. Unexpected errors are logged and not shown to the client."""
    if isinstance(error, RequestError):
        return error.status, answer(error.status, str(error), error.field, error.code)
    if isinstance(error, EngineStopped):
        return 503, answer(503, STOPPED)
    if isinstance(error, HTTPException):
        return error.status_code, answer(error.status_code, str(error.detail))
    if isinstance(error, ClientDisconnect):
        return GONE, answer(GONE, "the client disconnected")  # never read; counted, and not an error of the server
    log.error("a request failed", exc_info=error)
    return 500, answer(500, INTERNAL)


def answer(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorAnswer(ErrorBody(message, kind, param, code or CODES.get(status)))


# Anthropic's types of errors, and its name for fields of tools.
ANTHROPIC_TYPES = TYPES | {413: "request_too_large", 500: "api_error", 503: "api_error", 529: "overloaded_error"}
ANTHROPIC_NAMES = {".function.parameters": ".input_schema", ".function.name": ".name"}
OVERLOADED = 529


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, frozen=True):
    """Body of every 4xx and 5xx of Anthropic's routes."""

    error: AnthropicErrorBody
    type: str = "error"


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_error(error: Exception) -> tuple[int, AnthropicErrorAnswer]:
    """Return the status and body of an error in Anthropic's API, which has a status for a busy server."""
    status, found = describe(error)
    message = found.error.message
    if isinstance(error, RequestError) and (status == 503 or found.error.code == CODES[429]):
        status = OVERLOADED
    for ours, theirs in ANTHROPIC_NAMES.items():
        message = message.replace(ours, theirs, 1) if ours in (found.error.param or "") else message
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, AnthropicErrorAnswer(AnthropicErrorBody(kind, message))


def is_ollama(path: str) -> bool:
    """Return whether a path belongs to Ollama's API."""
    return path.startswith("/api/") and not path.startswith("/api/v0/")


class OllamaErrorAnswer(msgspec.Struct, frozen=True):
    """Body of every 4xx and 5xx of Ollama's routes."""

    error: str


def ollama_error(error: Exception) -> tuple[int, OllamaErrorAnswer]:
    """Return the status and body of an error in Ollama's API."""
    status, found = describe(error)
    return status, OllamaErrorAnswer(found.error.message)


def responses_error(error: Exception) -> tuple[int, ErrorAnswer]:
    """Return the status and body of an error in the Responses API, whose tools have no `function` level."""
    status, found = describe(error)
    field = found.error.param or ""
    flat = field.replace(".function.", ".", 1)
    if flat == field:
        return status, found
    renamed = msgspec.structs.replace(found.error, message=found.error.message.replace(field, flat, 1), param=flat)
    return status, ErrorAnswer(renamed)


def shaper_of(path: str) -> Callable[[Exception], tuple[int, Any]]:
    """Return what describes errors in the form of a path's API."""
    if is_ollama(path):
        return ollama_error
    return anthropic_error if is_anthropic(path) else responses_error if path == "/v1/responses" else describe


def response(error: Exception, path: str = "") -> Response:
    """Return the response to a request for this path that failed."""
    status, body = shaper_of(path)(error)
    headers = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (429, 503, OVERLOADED):
        headers["retry-after"] = str(getattr(error, "retry_seconds", 1))
    if isinstance(error, HTTPException) and error.headers:
        headers |= dict(error.headers)
    return json_response(body, status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
