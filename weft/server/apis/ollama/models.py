"""Ollama's routes about models: /api/tags, /api/ps, /api/show and /api/version, and those that change models."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.answers.vectors import capabilities as can
from weft.base.errors import InvalidField, RequestError
from weft.server.apis.control import CREATED
from weft.server.front import Front, ServerSide
from weft.server.http.errors import json_response
from weft.server.texts.bodies import read
from weft.text.infill import Infill

Object = dict[str, Any]
# The version of Ollama whose API this is; clients compare it with what they need.
OLLAMA_VERSION = "0.12.11"
# A model of a server with one model never expires.
NEVER = "9999-12-31T23:59:59Z"
FIXED = "models are chosen when the server starts: weft serve MODEL; nothing is downloaded or changed by a request"


class ShowRequest(msgspec.Struct, kw_only=True):
    """`name` is the older spelling of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


async def tags(front: Front, request: Request) -> Response:
    return json_response({"models": [card(front)]})


async def running(front: Front, request: Request) -> Response:
    loaded = {"expires_at": NEVER, "size_vram": card(front)["size"], "context_length": front.room}
    return json_response({"models": [card(front) | loaded]})


async def version(front: ServerSide, request: Request) -> Response:
    return json_response({"version": OLLAMA_VERSION, "weft": __version__})


async def show(front: Front, request: Request) -> Response:
    body = await read(request, ShowRequest, front.receiving)
    asked = body.model or body.name
    if asked is None:
        raise InvalidField("model", "must be given")
    front.check_model(asked)
    info, family = front.backend.info, front.backend.info.architecture
    parameters = [f"{name} {value}" for name, value in suggested(front).items()]
    return json_response(
        {
            "modelfile": f"FROM {front.model_name}",
            "parameters": "\n".join(parameters),
            "template": front.template.source if front.template is not None else "{{ .Prompt }}",
            "details": details(front),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": info.max_length,
                f"{family}.vocab_size": info.vocab_size,
            },
            "capabilities": capabilities(front),
            "modified_at": modified(),
        }
    )


async def unchanged(front: ServerSide, request: Request) -> Response:
    await front.receiving.read_body(request)
    raise RequestError(FIXED, 501)


def suggested(front: Front) -> Object:
    """Return the sampling that requests get by default, under Ollama's names."""
    params = front.suggested
    found = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    return found | {"repeat_penalty": params.repetition_penalty}


def capabilities(front: Front) -> list[str]:
    found = ["completion"] if front.vectors.generates else []
    if "embeddings" in can(front.vectors) and (front.vectors.stated or not found):
        found.append("embedding")
    if front.tool_parser is not None:
        found.append("tools")
    if front.reasoning_parser is not None:
        found.append("thinking")
    if front.tokenizer is not None and Infill.of(front.tokenizer) is not None:
        found.append("insert")
    return found


def card(front: Front) -> Object:
    """Return a model as lists show it. The digest stands for name and texts, not for the weights."""
    info = front.backend.info
    weights = info.settings.get("weights", {}).get("bytes", {})
    known = f"{info.name} {info.architecture} {info.dtype} {info.settings.get('digest', '')}"
    return {
        "name": front.model_name,
        "model": front.model_name,
        "modified_at": modified(),
        "size": sum(weights.values()),
        "digest": sha256(known.encode()).hexdigest(),
        "details": details(front),
    }


def details(front: Front) -> Object:
    info = front.backend.info
    weights = info.settings.get("weights", {}).get("bytes", {})
    most = max(weights, key=weights.__getitem__, default=info.dtype)
    return {
        "parent_model": "",
        "format": "weft",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": "",
        "quantization_level": most,
    }


def modified() -> str:
    return datetime.fromtimestamp(CREATED, UTC).isoformat().replace("+00:00", "Z")
