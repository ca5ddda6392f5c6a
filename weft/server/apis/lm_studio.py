"""GET /api/v0/models, as in LM Studio. Its routes that generate are OpenAI's under another path."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.server.front import Front
from weft.server.http.errors import json_response


async def models(front: Front, request: Request) -> Response:
    return json_response({"object": "list", "data": [card(front)]})


async def model(front: Front, request: Request) -> Response:
    front.check_model(request.path_params["name"])
    return json_response(card(front))


def card(front: Front) -> dict[str, Any]:
    info = front.backend.info
    return {
        "id": front.model_name,
        "object": "model",
        "type": "llm" if front.vectors.generates else "embeddings",
        "publisher": "weft",
        "arch": info.architecture,
        "compatibility_type": "safetensors",
        "quantization": info.settings.get("quantize", info.dtype),
        "state": "loaded",
        "max_context_length": info.max_length,
        "loaded_context_length": front.room,
    }
