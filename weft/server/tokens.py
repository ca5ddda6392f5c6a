"""POST /tokenize and /detokenize, as vLLM spells them: texts and conversations as token ids, and back."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import FieldError, json_response
from weft.server.front import Front
from weft.server.limits import read
from weft.server.openai_messages import ChatMessage, Tool, plain_messages, plain_tools
from weft.server.openai_shapes import token_text
from weft.server.schemas import TokenId
from weft.text.prompts import checked_tokens


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A `prompt`, or `messages` (and `tools`) of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    prompt: str


async def tokenize(front: Front, request: Request) -> Response:
    body = await read(request, TokenizeRequest, front.limits)
    front.check_model(body.model)
    tokenizer = front.need_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "or messages must be given, one of them")
    if body.messages is not None:
        messages, tools = plain_messages(body.messages, front.limits), plain_tools(body.tools, front.limits)
        opens = body.add_generation_prompt is not False
        variables = front.template_variables(body.chat_template_kwargs)
        tokens = (await front.render(messages, tools or None, variables, opens))[0].tolist()
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        tokens = await front.beside(len(text), lambda: tokenizer.encode(text, special))
    strings = [token_text(tokenizer, token) for token in tokens] if body.return_token_strs else None
    found = TokenizeAnswer(
        count=len(tokens), max_model_len=front.backend.info.max_length, tokens=tokens, token_strs=strings
    )
    return json_response(found)


async def detokenize(front: Front, request: Request) -> Response:
    body = await read(request, DetokenizeRequest, front.limits)
    front.check_model(body.model)
    tokenizer = front.need_tokenizer()
    if body.tokens:
        checked_tokens(body.tokens, front.backend.info.vocab_size, "tokens")
    text = await front.beside(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special=False))
    return json_response(DetokenizeAnswer(prompt=text))
