"""Tool calls in tags, as in Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>`.

Values have no quotes, so the tool's schema decides whether `5` is a number or a string.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

from weft.text.answer_parts import as_json
from weft.text.formats.json_calls import SPACE
from weft.text.scanner import JsonPieces, Malformed, Reading, Scanner

# JSON schemas by tool and parameter.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION = "<function="
_PARAMETER = "<parameter="
_MAX_NAME = 256
VALUE_ENDS = ("</parameter>", "</function>\n</tool_call>", "</function></tool_call>")


def tagged(scanner: Scanner, schemas: Schemas) -> Reading:
    """Read content, and calls in tags. Models sometimes omit the outer tags."""
    while marker := (yield from scanner.skip_to(("<tool_call>", _FUNCTION), scanner.content)):
        yield from scanner.attempt(marker, _calls(scanner, marker == _FUNCTION, schemas))


def _calls(scanner: Scanner, begun: bool, schemas: Schemas) -> Reading:
    while begun or (yield from _reads(scanner, _FUNCTION)):
        begun = False
        name = (yield from _up_to(scanner, ">")).strip()
        scanner.begin_call(name)
        yield from _parameters(scanner, schemas.get(name, {}))
    yield from _reads(scanner, "</tool_call>")


def _parameters(scanner: Scanner, schemas: Mapping[str, Any]) -> Reading:
    """Read the arguments of one call, each as soon as it is complete. A truncated answer leaves them open."""
    before, ended = "{", False
    while not ended and (yield from _reads(scanner, _PARAMETER)):
        key = (yield from _up_to(scanner, ">")).strip()
        value, marker = yield from _value(scanner, schemas.get(key))
        scanner.arguments(f"{before}{as_json(key)}: {typed(value, schemas.get(key))}")
        before, ended = ", ", marker != VALUE_ENDS[0]
    if ended or (yield from _reads(scanner, "</function>")) or (yield from scanner.peek()):
        scanner.arguments("{}" if before == "{" else "}")


def _value(scanner: Scanner, schema: Any) -> Generator[None, None, tuple[str, str]]:
    """Read a value and the marker that ends it; return both. A marker inside JSON's quotes ends nothing."""
    pieces: list[str] = []
    if not is_string(schema):
        with scanner.rereadable() as start:
            if (yield from scanner.skip(SPACE)) in ("{", "[", '"'):
                with suppress(Malformed):
                    yield from scanner.json_stream(JsonPieces(pieces.append))
                    yield from scanner.skip(SPACE)
                    if marker := (yield from scanner.sees(*VALUE_ENDS)):
                        scanner.place += len(marker)
                        return "".join(pieces), marker
                if not (yield from scanner.peek()):
                    raise Malformed  # cut short
            scanner.place = start
            pieces.clear()
    marker = yield from scanner.skip_to(VALUE_ENDS, pieces.append)
    if not marker:
        raise Malformed
    return "".join(pieces).removeprefix("\n").removesuffix("\n"), marker


def _reads(scanner: Scanner, wanted: str) -> Generator[None, None, bool]:
    """Skip whitespace and this text, if it comes next; return whether it does."""
    yield from scanner.skip(SPACE)
    found = yield from scanner.sees(wanted)
    scanner.place += len(found)
    return bool(found)


def _up_to(scanner: Scanner, end: str) -> Generator[None, None, str]:
    pieces: list[str] = []
    while (character := (yield from scanner.peek())) != end:
        if not character or len(pieces) > _MAX_NAME:
            raise Malformed
        pieces.append(character)
        scanner.place += 1
    scanner.place += 1
    return "".join(pieces)


def is_string(schema: Any) -> bool:
    """Return whether a value may be a string, which has no quotes here."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def typed(text: str, schema: Any) -> str:
    """Return a value as JSON, by its schema: a string stays one; others are JSON already, or Python literals.

    >>> typed("5", {"type": "string"}), typed("5", {"type": "integer"}), typed("None", None), typed("[1", None)
    ('"5"', '5', 'null', '"[1"')
    """
    if is_string(schema) and (schema["type"] == "string" or text != "null"):
        return as_json(text)
    word = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    try:
        value = json.loads(word, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return as_json(text)
    try:
        return as_json(value)
    except ValueError:  # a number that no float can hold is JSON all the same
        return word


def _no_number(word: str) -> None:
    raise ValueError(word)
