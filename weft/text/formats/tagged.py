"""Tool calls in tags, as in Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>`.

Values have no quotes, so the tool's schema decides whether `5` is a number or a string.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

from weft.text.formats.json_calls import SPACE
from weft.text.parts import as_json
from weft.text.reader import Malformed, Reader, Reading

# JSON schemas by tool and parameter.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION = "<function="
_PARAMETER = "<parameter="
_MAX_NAME = 256
_VALUE_ENDS = ("</parameter>", "</function>\n</tool_call>", "</function></tool_call>")


def tagged(reader: Reader, schemas: Schemas) -> Reading:
    """Read content, and calls in tags. Models sometimes omit the outer tags."""
    while marker := (yield from reader.skip_to(("<tool_call>", _FUNCTION), reader.content)):
        yield from reader.attempt(marker, _calls(reader, marker == _FUNCTION, schemas))


def _calls(reader: Reader, begun: bool, schemas: Schemas) -> Reading:
    while begun or (yield from _reads(reader, _FUNCTION)):
        begun = False
        name = (yield from _up_to(reader, ">")).strip()
        reader.begin_call(name)
        yield from _parameters(reader, schemas.get(name, {}))
    yield from _reads(reader, "</tool_call>")


def _parameters(reader: Reader, schemas: Mapping[str, Any]) -> Reading:
    """Read the arguments of one call, each as soon as it is complete. A truncated answer leaves them open."""
    before, ended = "{", False
    while not ended and (yield from _reads(reader, _PARAMETER)):
        key = (yield from _up_to(reader, ">")).strip()
        pieces: list[str] = []
        marker = yield from reader.skip_to(_VALUE_ENDS, pieces.append)
        if not marker:
            raise Malformed
        value = "".join(pieces).removeprefix("\n").removesuffix("\n")
        reader.arguments(f"{before}{as_json(key)}: {typed(value, schemas.get(key))}")
        before, ended = ", ", marker != _VALUE_ENDS[0]
    if ended or (yield from _reads(reader, "</function>")) or (yield from reader.peek()):
        reader.arguments("{}" if before == "{" else "}")


def _reads(reader: Reader, wanted: str) -> Generator[None, None, bool]:
    """Skip whitespace and this text, if it comes next; return whether it does."""
    yield from reader.skip(SPACE)
    found = yield from reader.sees(wanted)
    reader.place += len(found)
    return bool(found)


def _up_to(reader: Reader, end: str) -> Generator[None, None, str]:
    pieces: list[str] = []
    while (character := (yield from reader.peek())) != end:
        if not character or len(pieces) > _MAX_NAME:
            raise Malformed
        pieces.append(character)
        reader.place += 1
    reader.place += 1
    return "".join(pieces)


def typed(text: str, schema: Any) -> str:
    """Return a value as JSON, by its schema: a string stays one; others are JSON already, or Python literals.

    >>> typed("5", {"type": "string"}), typed("5", {"type": "integer"}), typed("None", None), typed("[1", None)
    ('"5"', '5', 'null', '"[1"')
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind and text != "null"):
        return as_json(text)
    word = text.strip()
    try:
        return as_json(json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word)))
    except (ValueError, RecursionError):
        return as_json(text)
