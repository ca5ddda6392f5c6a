"""POST /tokenize and /detokenize, as in vLLM: texts and conversations to token ids, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.base.errors import InvalidField
from weft.server.apis.openai_shapes import token_text
from weft.server.front import Front
from weft.server.texts.bodies import decode
from weft.server.texts.body_reader import is_quick
from weft.server.texts.openai_messages import ChatMessage, Tool
from weft.server.texts.prompt_builder import PromptBuilder
from weft.server.texts.schemas import TokenId, check_ending
from weft.text.prompts import checked_tokens


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A `prompt`, or `messages` (and `tools`) of a conversation; or, as llama.cpp has it, `content`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenPiece(msgspec.Struct, kw_only=True):
    id: int
    piece: str


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Text of the tokens, under the names that vLLM and llama.cpp use."""

    prompt: str
    content: str


async def tokenize(front: Front, request: Request) -> Response:
    return await answered(front, request, "tokenize", tokenized)


async def detokenize(front: Front, request: Request) -> Response:
    return await answered(front, request, "detokenize", detokenized)


async def answered(
    front: Front, request: Request, name: str, answer: Callable[[PromptBuilder, bytes], bytes]
) -> Response:
    """Respond with the result for a body. It counts as an open request, and ends with its client."""
    body = await front.receiving.read_body(request)
    with front.counted(1):
        if is_quick(body, front.builder):
            found = answer(front.builder, body)
        else:
            found = await front.read_in_worker(request, name, body)
    return Response(found, media_type="application/json")


def tokenized(builder: PromptBuilder, data: bytes) -> bytes:
    """Return the response to a body of /tokenize. Texts are bounded like prompts, before they are tokenized."""
    body = decode(data, TokenizeRequest, builder.limits)
    builder.check_model(body.model)
    tokenizer = builder.need_tokenizer()
    if [body.prompt, body.messages, body.content].count(None) != 2:
        raise InvalidField("prompt", "or messages or content must be given, and only one of them")
    if body.parse_special is False:
        raise InvalidField("parse_special", "must be true: special tokens in texts are recognised everywhere")
    if body.messages is not None:
        check_ending(body.add_generation_prompt, body.continue_final_message)
        prompt = builder.render_conversation(
            body.messages,
            body.tools,
            None,
            body.chat_template_kwargs,
            opens=body.add_generation_prompt is not False,
            continues=bool(body.continue_final_message),
        )
        tokens, field = prompt.tokens.tolist(), "messages"
    else:
        field = "prompt" if body.content is None else "content"
        text = body.prompt or body.content or ""
        builder.check_size(len(text), field)
        # llama.cpp's default is without them.
        special = body.add_special_tokens is not False if body.content is None else bool(body.add_special)
        tokens = tokenizer.encode(text, special)
    builder.check_tokens(len(tokens), field)
    strings = [token_text(tokenizer, token) for token in tokens] if body.return_token_strs else None
    pieces: list[int | TokenPiece] = [*tokens]
    if body.with_pieces:
        pieces = [TokenPiece(id=each, piece=token_text(tokenizer, each)) for each in tokens]
    found = TokenizeAnswer(count=len(tokens), max_model_len=builder.facts.max_length, tokens=pieces, token_strs=strings)
    return msgspec.json.encode(found)


def detokenized(builder: PromptBuilder, data: bytes) -> bytes:
    """Return the response to a body of /detokenize."""
    body = decode(data, DetokenizeRequest, builder.limits)
    builder.check_model(body.model)
    tokenizer = builder.need_tokenizer()
    builder.check_tokens(len(body.tokens), "tokens")
    if body.tokens:
        checked_tokens(body.tokens, builder.facts.vocab_size, "tokens")
    text = tokenizer.decode(body.tokens, skip_special=False)
    return msgspec.json.encode(DetokenizeAnswer(prompt=text, content=text))
