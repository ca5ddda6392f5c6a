"""The routes of Ollama's API that generate: POST /api/chat and /api/generate."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.delivery import LINES, deliver
from weft.server.apis.ollama.answers import OllamaAnswer, as_line, heading, nothing
from weft.server.apis.ollama.bodies import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    chat_prompts,
    generate_prompts,
)
from weft.server.front import Front
from weft.server.http.errors import json_response, ollama_error
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.prompt_builder import Prompt

PARTS = {"options": OllamaOptions}
OLLAMA_CHAT = BodyReader("ollama_chat", OllamaChatRequest, chat_prompts, parts=PARTS)
OLLAMA_GENERATE = BodyReader("ollama_generate", OllamaGenerateRequest, generate_prompts, parts=PARTS)


async def chat(front: Front, request: Request) -> Response:
    return await answered(front, request, *await front.read_prompts(request, OLLAMA_CHAT))


async def generate(front: Front, request: Request) -> Response:
    return await answered(front, request, *await front.read_prompts(request, OLLAMA_GENERATE))


async def answered(
    front: Front, request: Request, body: OllamaChatRequest | OllamaGenerateRequest, prompts: list[Prompt]
) -> Response:
    if not prompts:
        return json_response(nothing(front.model_name, body))
    answer = OllamaAnswer(front, body, prompts[0])
    generation = await answer.start(request.state.tenant)
    empty = {"message": {"role": "assistant", "content": ""}} if answer.is_chat else {"response": ""}
    return await deliver(
        front,
        request,
        generation,
        # Unlike in the other APIs, this is the default.
        answer.lines(generation) if body.stream is not False else None,
        lambda: answer.whole(generation),
        failed=failed,
        done=b"",
        keep_alive=as_line(heading(front.model_name) | empty | {"done": False}),
        media_type=LINES,
    )


def failed(error: Exception) -> bytes:
    return as_line(ollama_error(error)[1])
