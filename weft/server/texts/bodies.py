"""Decodes bodies within bounds. A malformed, oversized or wrongly typed body gets a 4xx that says why."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from weft.base.errors import InvalidField, RequestError
from weft.server.http.receiving import Receiving
from weft.server.settings import Limits
from weft.text.nesting import nesting

T = TypeVar("T")
# For a body without prompts. `body_reader.py` decides where others are read.
MAX_PLAIN_BYTES = 1 << 16
# Maximum characters of a message that quotes the client.
MAX_QUOTED = 300
NO_BUILT_IN_TOOLS = "the server has no tools of its own, such as web search; send tools of the type function"


async def read(request: Request, kind: type[T], receiving: Receiving) -> T:
    """Return a body without prompts, decoded to a type."""
    body = await receiving.read_body(request)
    if len(body) > MAX_PLAIN_BYTES:
        raise RequestError(f"a body for this route may have {MAX_PLAIN_BYTES} bytes, got {len(body)}", 413)
    return decode(body, kind, receiving.limits)


def decode(body: bytes, kind: type[T], limits: Limits) -> T:
    """Decode a body to a type; errors name the field that does not match."""
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object")
    check_depth(body, limits.json_depth)
    return parsed(msgspec.json.Decoder(kind), body)


def parsed(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode JSON from a client; every error is the client's."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise wrong_type(str(error)) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} (0x{error.object[error.start]:02x})") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def wrong_type(message: str) -> RequestError:
    """
    >>> str(wrong_type("Expected `int`, got `str` - at `$.stream_options.x`"))
    'stream_options.x: expected `int`, got `str`'
    """
    # The last one is the library's own; a quoted value may contain another.
    what, _, where = message.rpartition(" - at ") if " - at " in message else (message, "", "")
    what = (what[:1].lower() + what[1:])[:MAX_QUOTED]
    found = re.search(r"`\$\.?([^`]*)`", where)
    if found is None or not found[1]:
        return RequestError(f"the body: {what}")
    field = found[1].replace("[...]", "")
    if re.fullmatch(r"tools(\[\d*\])?\.type", field) and "enum value" in what:
        return RequestError(f"{field}: {what}; {NO_BUILT_IN_TOOLS}", field=field)
    return RequestError(f"{field}: {what}", field=field)


def check_depth(body: bytes, depth: int) -> None:
    """Refuse deep nesting before any code recurses into it."""
    if body.count(b"[") + body.count(b"{") > depth and nesting(body) > depth:
        raise RequestError(f"the body is nested more than {depth} levels deep")


def check_count(name: str, value: int, most: int, least: int = 0) -> None:
    if not least <= value <= most:
        raise InvalidField(name, f"must be from {least} to {most}, got {value}")


def check_items(name: str, items: Any, most: int) -> None:
    if items is not None and len(items) > most:
        raise InvalidField(name, f"takes at most {most} items, got {len(items)}")


def read_json(name: str, text: str, depth: int) -> Any:
    """Parse a field that holds JSON as text. Raises `ValueError` for other text, `InvalidField` if it is too deep."""
    check_text_depth(name, text, depth)
    return json.loads(text)


def check_text_depth(name: str, text: str, depth: int) -> None:
    """Refuse a field whose text, read as JSON, is nested too deeply."""
    try:
        check_depth(text.encode(), depth)
    except RequestError:
        raise InvalidField(name, f"is nested more than {depth} levels deep") from None


def check_schema(name: str, schema: Any, limits: Limits) -> str:
    """Return a JSON schema as text, after checking its size and depth."""
    text = json.dumps(schema)
    if len(text) > limits.schema_bytes:
        raise InvalidField(name, f"has {len(text)} bytes; the limit of a schema is {limits.schema_bytes}")
    if depth_of(schema) > limits.schema_depth:
        raise InvalidField(name, f"is nested more than {limits.schema_depth} levels deep")
    return text


def check_regex(name: str, regex: str, limits: Limits) -> str:
    if not 0 < len(regex) <= limits.regex_characters:
        raise InvalidField(name, f"must have 1 to {limits.regex_characters} characters, got {len(regex)}")
    return regex


def depth_of(value: Any) -> int:
    """
    >>> depth_of({"a": [1, {}]}), depth_of(1)
    (3, 0)
    """
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0
