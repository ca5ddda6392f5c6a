"""What the server reads of a body before its model is known: the model's name, and how to wait for it."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive

from weft.base.durations import duration_seconds
from weft.base.errors import InvalidField
from weft.server.apis.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest
from weft.server.http.errors import is_ollama
from weft.server.settings import Limits
from weft.server.texts.bodies import decode

# Bodies without a prompt, which only ask to load a model or to unload it.
KINDS: dict[str, type[OllamaChatRequest | OllamaGenerateRequest]] = {
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
}


class ModelFields(msgspec.Struct, kw_only=True):
    """`id` is that of an answer to go on with; `name` is the older spelling of `model` in /api/show."""

    model: str | None = None
    name: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    id: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    stream: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    keep_alive: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    messages: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    prompt: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    suffix: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


NOTHING = (b"", b"null", b"[]", b'""')


def asked_of(data: bytes, limits: Limits) -> ModelFields:
    """Return the fields; only what is not JSON, or names a model by no text, is refused here."""
    return decode(data, ModelFields, limits)


def text_of(raw: msgspec.Raw) -> str | None:
    """Return a field that should be a text, if it is one of reasonable length."""
    data = bytes(raw)
    return msgspec.json.decode(data) if data.startswith(b'"') and len(data) < 1 << 12 else None


def streams(asked: ModelFields, path: str) -> bool:
    """Return whether the answer is a stream; in Ollama's API it is by default."""
    value = bytes(asked.stream).strip()
    return value == b"true" or (path in KINDS and value != b"false")


def keep_alive_of(asked: ModelFields, path: str) -> float | None:
    """Return the hint of Ollama's clients in seconds, infinite for "never"; None: there is none."""
    raw = bytes(asked.keep_alive).strip()
    if not is_ollama(path) or raw in (b"", b"null"):
        return None
    if len(raw) < 64 and re.fullmatch(rb'-?[\d.]+|"[^"\\]*"', raw):
        try:
            return duration_seconds(raw.decode().strip('"'))
        except ValueError:
            pass
    raise InvalidField("keep_alive", 'must be seconds or a duration such as "5m"; negative: never unload')


def only_unloads(asked: ModelFields, path: str) -> bool:
    """Return whether a body has no prompt and asks to unload its model."""
    empty = all(bytes(each).strip() in NOTHING for each in (asked.messages, asked.prompt, asked.suffix))
    return path in KINDS and empty and keep_alive_of(asked, path) == 0


def again(request: Request, data: bytes, receive: Receive | None = None) -> Request:
    """Return a request whose body has been read as if it had not been. `receive` tells when the client has left."""
    unread: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
    rest = receive or request.receive

    async def next_message() -> Message:
        return unread.pop() if unread else await rest()

    return Request(request.scope, next_message)
