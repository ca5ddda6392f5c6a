"""Tool calls as JSON objects with a name and arguments, alone or in a list. Arguments are streamed as they arrive."""

from __future__ import annotations

import json
from collections.abc import Collection

from weft.text.parts import is_text
from weft.text.reader import Malformed, Reader, Reading

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id", "index", "function")


def marked(reader: Reader, starts: tuple[str, ...], ends: tuple[str, ...]) -> Reading:
    """Read content, and JSON calls between markers. A missing end marker is tolerated."""
    while marker := (yield from reader.skip_to(starts, reader.content)):
        yield from reader.attempt(marker, _marked_calls(reader, ends))


def _marked_calls(reader: Reader, ends: tuple[str, ...]) -> Reading:
    yield from json_calls(reader)
    yield from reader.skip(SPACE)
    if ends:
        yield from reader.pass_by(*ends)


def bare(reader: Reader, tag: str, known: Collection[str] | None) -> Reading:
    """Read calls after a tag, or an answer that consists only of calls of known tools from its first character on."""
    if (yield from reader.skip(SPACE, reader.content)) == "{":
        yield from reader.attempt("", json_calls(reader, known, strict=True))
    while marker := (yield from reader.skip_to((tag,), reader.content)):
        yield from reader.attempt(marker, json_calls(reader))


def named(reader: Reader, tag: str) -> Reading:
    """Read Mistral's format: a tag, then a list of calls, or a name, an optional id, and arguments."""
    while marker := (yield from reader.skip_to((tag,), reader.content)):
        yield from reader.attempt(marker, _named_call(reader))


def _named_call(reader: Reader) -> Reading:
    if (yield from reader.skip(SPACE)) in ("[", "{"):
        yield from json_calls(reader)
        return
    name: list[str] = []
    while (character := (yield from reader.peek())) not in ("{", "[", ""):
        name.append(character)
        reader.place += 1
    if (yield from reader.sees("[CALL_ID]")):
        yield from reader.skip_to(("[ARGS]",), lambda identity: None)
    elif (yield from reader.sees("[ARGS]")):
        yield from reader.expect("[ARGS]")
    if (yield from reader.skip(SPACE)) != "{":
        raise Malformed
    reader.begin_call("".join(name).strip())
    yield from reader.json_stream(reader.arguments)


def json_calls(reader: Reader, known: Collection[str] | None = None, strict: bool = False) -> Reading:
    """Read one call, several with commas, semicolons or nothing between them, or a list of calls.

    `strict`: an object with other members, or with a name that is not `known`, is not a call.
    """
    listed = (yield from reader.skip(SPACE)) == "["
    reader.place += listed
    while (yield from reader.skip(SPACE)) == "{":
        yield from _json_call(reader, known, strict)
        if (yield from reader.skip(SPACE)) in (",", ";"):
            reader.place += 1
    if listed:
        yield from reader.expect("]")


def _json_call(reader: Reader, known: Collection[str] | None, strict: bool, wrapped: bool = False) -> Reading:
    """Read one call. `wrapped`: it is the `function` of another object, and may not have a `function` itself."""
    reader.place += 1
    calls, name, held = reader.calls, None, "{}"
    while (yield from reader.skip(SPACE)) != "}":
        key = yield from reader.json_string()
        yield from reader.skip(SPACE)
        yield from reader.expect(":")
        first = yield from reader.skip(SPACE)
        if key == "name":
            name = yield from reader.json_string()
            if strict and known is not None and name not in known:
                raise Malformed
        elif key in _ARGUMENTS and first == "{" and name is not None and reader.calls == calls:
            reader.begin_call(name)
            yield from reader.json_stream(reader.arguments)
        elif key in _ARGUMENTS:
            held = yield from reader.json_value()
        elif key == "function" and first == "{" and not wrapped:
            yield from _json_call(reader, known, strict, wrapped=True)
        elif strict and key not in _BESIDE:
            raise Malformed
        else:
            yield from reader.json_value()
        if (yield from reader.skip(SPACE)) == ",":
            reader.place += 1
        elif (yield from reader.peek()) != "}":
            raise Malformed
    reader.place += 1
    if reader.calls == calls:
        arguments = _object(held)
        reader.begin_call(name or "")
        reader.arguments(arguments)


def _object(text: str) -> str:
    """Return the JSON object of arguments that came before their name, or inside a string."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value, json.loads(value or "{}")
    except (ValueError, RecursionError):
        raise Malformed from None
    if value is None or value == "":
        return "{}"
    if not isinstance(value, dict) or not is_text(text):
        raise Malformed
    return text or "{}"
