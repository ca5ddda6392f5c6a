"""GET /props and /slots, as in llama.cpp's server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.server.front import Front
from weft.server.http.errors import json_response


async def props(front: Front, request: Request) -> Response:
    suggested, specials = front.suggested, {} if front.tokenizer is None else front.tokenizer.specials
    params = {
        "temperature": suggested.temperature,
        "top_k": suggested.top_k,
        "top_p": suggested.top_p,
        "min_p": suggested.min_p,
        "repeat_penalty": suggested.repetition_penalty,
        "n_predict": -1,
    }
    return json_response(
        {
            "default_generation_settings": {"n_ctx": front.room, "params": params},
            "total_slots": front.backend.info.max_sequences,
            "model_alias": front.model_name,
            "model_path": front.backend.info.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "" if front.template is None else front.template.source,
            "bos_token": specials.get("bos_token", ""),
            "eos_token": specials.get("eos_token", ""),
            "build_info": f"weft-{__version__}",
        }
    )


async def slots(front: Front, request: Request) -> Response:
    """Report the running and waiting sequences of the caller's own key; no text is shown."""
    own = [each for each in front.generations if each.tenant == request.state.tenant]
    sequences = [sequence for generation in own for sequence in generation.sequences]
    return json_response(
        [
            {
                "id": place,
                "n_ctx": front.room,
                "is_processing": True,
                "n_prompt_tokens": len(sequence.request.prompt),
                "next_token": {
                    "n_decoded": sequence.generated,
                    "n_remain": sequence.request.params.max_tokens - sequence.generated,
                    "has_next_token": sequence.finish is None,
                },
            }
            for place, sequence in enumerate(sequences)
        ]
    )
