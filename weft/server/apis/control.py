"""Routes that generate nothing for a client: models, health, server facts, flushing, aborting."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.answers.vectors import capabilities
from weft.base.errors import EngineStopped, InvalidField, RequestError
from weft.base.grid import CELL
from weft.base.sampling import SamplingParams
from weft.server.access.auth import Tenant
from weft.server.front import AskedPrompt, Front, ServerSide, new_name
from weft.server.http.errors import json_response
from weft.server.texts.bodies import read
from weft.server.texts.prompt_builder import Prompt

HEALTH_SECONDS = 20.0
CREATED = int(time.time())


class AbortRequest(msgspec.Struct, kw_only=True):
    """`rid` is a native request's id or the id of an OpenAI response."""

    rid: str | list[str] | None = None
    abort_all: bool | None = None


class AbortAnswer(msgspec.Struct, kw_only=True):
    aborted: int


class FlushAnswer(msgspec.Struct, kw_only=True):
    """`cached_tokens` are those left because running sequences use them."""

    success: bool = True
    cached_tokens: int


async def models(front: Front, request: Request) -> Response:
    return json_response({"object": "list", "data": [model_card(front)]})


async def model(front: Front, request: Request) -> Response:
    front.check_model(request.path_params["name"])
    return json_response(model_card(front))


def model_card(front: Front) -> dict[str, Any]:
    info = front.backend.info
    return {
        "id": front.model_name,
        "object": "model",
        "created": CREATED,
        "owned_by": "weft",
        "root": info.name,
        "max_model_len": info.max_length,
        "capabilities": capabilities(front.vectors),
        "embedding_size": front.vectors.size if "embeddings" in capabilities(front.vectors) else None,
        **({"aliases": front.aliases} if front.aliases else {}),
    }


async def model_info(front: Front, request: Request) -> Response:
    info = front.backend.info
    return json_response(
        {
            "model_path": info.name,
            "served_model_name": front.model_name,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "vocab_size": info.vocab_size,
            "max_length": info.max_length,
            "is_generation": front.vectors.generates,
            "has_tokenizer": front.tokenizer is not None,
            "has_chat_template": front.template is not None,
        }
    )


async def server_info(front: Front, request: Request) -> Response:
    need_admin(request)
    info, stats = front.backend.info, await front.backend.stats()
    return json_response(
        {
            "version": __version__,
            "model": front.model_name,
            "model_path": info.name,
            "max_length": info.max_length,
            "max_sequences": info.max_sequences,
            "exact": info.settings["exact"],
            "draft": info.settings["draft"],
            # Of a fleet, each replica has its own, in the stats.
            **({} if "replicas" in stats else {"role": info.settings.get("role", "both")}),
            "weights": info.settings.get("weights", {}),
            "device": info.settings.get("device", ""),
            "auto": info.settings.get("auto", {}),
            "quantize": info.settings.get("quantize", "off"),
            "memory_bytes": info.memory_bytes,
            "memory_tokens": info.memory_tokens,
            "open_sequences": front.open_sequences,
            "limits": msgspec.to_builtins(front.limits),
            "stats": stats,
            # Under the names that SGLang's tools expect.
            "max_total_num_tokens": info.memory_tokens,
            "max_running_requests": info.max_sequences,
            "disable_radix_cache": not info.settings["cache"],
            "chunked_prefill_size": info.settings["max_tokens_per_step"],
            "page_size": CELL,
            "internal_states": [stats],
        }
    )


async def version(front: ServerSide, request: Request) -> Response:
    return json_response({"version": __version__})


async def load(front: Front, request: Request) -> Response:
    """Report the number of requests in progress, of all clients."""
    need_admin(request)
    return json_response({"server_load": len(front.generations)})


async def flush_cache(front: Front, request: Request) -> Response:
    need_admin(request)
    return json_response(FlushAnswer(cached_tokens=await front.backend.flush()))


async def abort_request(front: Front, request: Request) -> Response:
    body = await read(request, AbortRequest, front.receiving)
    if body.rid is None and not body.abort_all:
        raise InvalidField("rid", "or abort_all must be given")
    names = None if body.abort_all else [body.rid] if isinstance(body.rid, str) else body.rid
    return json_response(AbortAnswer(aborted=front.abort(names, request.state.tenant)))


async def health(front: Front, request: Request) -> Response:
    """Report up or down and nothing else, because the route may need no key."""
    return json_response({"status": "ok"}) if front.backend.healthy else json_response({"status": "down"}, 503)


async def health_generate(front: Front, request: Request) -> Response:
    """Report health by generating one token within a few seconds."""
    if not front.backend.healthy:
        raise EngineStopped("unhealthy")
    params = SamplingParams(max_tokens=int(front.vectors.generates), temperature=0.0, ignore_eos=True)
    asked = AskedPrompt(Prompt(np.zeros(1, np.int32)), params)
    generation = await front.generate([asked], Tenant(b"health"), name=new_name("health-"), priority=-1)
    try:
        await asyncio.wait_for(generation.collect(), HEALTH_SECONDS)
    except TimeoutError:
        raise RequestError(f"the engine returned no token within {HEALTH_SECONDS:g} seconds", 503) from None
    finally:
        generation.close()
    return json_response({"status": "ok"})


def need_admin(request: Request) -> None:
    if not request.state.tenant.admin:
        raise HTTPException(403, "this route affects all clients and needs the admin key")
