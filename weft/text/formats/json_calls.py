"""Tool calls as JSON objects with a name and arguments, alone or in a list. Arguments are streamed as they arrive."""

from __future__ import annotations

import json
from collections.abc import Collection

from weft.text.answer_parts import is_text
from weft.text.scanner import Malformed, Reading, Scanner

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id", "index", "function")


def marked(scanner: Scanner, starts: tuple[str, ...], ends: tuple[str, ...]) -> Reading:
    """Read content, and JSON calls between markers. A missing end marker is tolerated."""
    while marker := (yield from scanner.skip_to(starts, scanner.content)):
        yield from scanner.attempt(marker, _marked_calls(scanner, ends))


def _marked_calls(scanner: Scanner, ends: tuple[str, ...]) -> Reading:
    yield from json_calls(scanner)
    yield from scanner.skip(SPACE)
    if ends:
        yield from scanner.pass_by(*ends)


def bare(scanner: Scanner, tag: str, known: Collection[str] | None) -> Reading:
    """Read calls after a tag, or an answer that consists only of calls of known tools from its first character on."""
    if (yield from scanner.skip(SPACE, scanner.content)) == "{":
        yield from scanner.attempt("", json_calls(scanner, known, strict=True))
    while marker := (yield from scanner.skip_to((tag,), scanner.content)):
        yield from scanner.attempt(marker, json_calls(scanner))


def named(scanner: Scanner, tag: str) -> Reading:
    """Read Mistral's format: a tag, then a list of calls, or a name, an optional id, and arguments."""
    while marker := (yield from scanner.skip_to((tag,), scanner.content)):
        yield from scanner.attempt(marker, _named_call(scanner))


def _named_call(scanner: Scanner) -> Reading:
    if (yield from scanner.skip(SPACE)) in ("[", "{"):
        yield from json_calls(scanner)
        return
    name: list[str] = []
    while (character := (yield from scanner.peek())) not in ("{", "[", ""):
        name.append(character)
        scanner.place += 1
    if (yield from scanner.sees("[CALL_ID]")):
        yield from scanner.skip_to(("[ARGS]",), lambda identity: None)
    elif (yield from scanner.sees("[ARGS]")):
        yield from scanner.expect("[ARGS]")
    if (yield from scanner.skip(SPACE)) != "{":
        raise Malformed
    scanner.begin_call("".join(name).strip())
    yield from scanner.json_stream(scanner.arguments)


def json_calls(scanner: Scanner, known: Collection[str] | None = None, strict: bool = False) -> Reading:
    """Read one call, several with commas, semicolons or nothing between them, or a list of calls.

    `strict`: an object with other members, or with a name that is not `known`, is not a call.
    """
    listed = (yield from scanner.skip(SPACE)) == "["
    scanner.place += listed
    while (yield from scanner.skip(SPACE)) == "{":
        yield from _json_call(scanner, known, strict)
        if (yield from scanner.skip(SPACE)) in (",", ";"):
            scanner.place += 1
    if listed:
        yield from scanner.expect("]")


def _json_call(scanner: Scanner, known: Collection[str] | None, strict: bool, wrapped: bool = False) -> Reading:
    """Read one call. `wrapped`: it is the `function` of another object, and may not have a `function` itself."""
    scanner.place += 1
    calls, name, held = scanner.calls, None, "{}"
    while (yield from scanner.skip(SPACE)) != "}":
        key = yield from scanner.json_string()
        yield from scanner.skip(SPACE)
        yield from scanner.expect(":")
        first = yield from scanner.skip(SPACE)
        if key == "name":
            name = yield from scanner.json_string()
            if strict and known is not None and name not in known:
                raise Malformed
        elif key in _ARGUMENTS and first == "{" and name is not None and scanner.calls == calls:
            scanner.begin_call(name)
            yield from scanner.json_stream(scanner.arguments)
        elif key in _ARGUMENTS:
            held = yield from scanner.json_value()
        elif key == "function" and first == "{" and not wrapped:
            yield from _json_call(scanner, known, strict, wrapped=True)
        elif strict and key not in _BESIDE:
            raise Malformed
        else:
            yield from scanner.json_value()
        if (yield from scanner.skip(SPACE)) == ",":
            scanner.place += 1
        elif (yield from scanner.peek()) != "}":
            raise Malformed
    scanner.place += 1
    if scanner.calls == calls:
        arguments = _object(held)
        scanner.begin_call(name or "")
        scanner.arguments(arguments)


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
