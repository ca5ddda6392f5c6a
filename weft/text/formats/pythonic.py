"""Tool calls as Python: `[name(key="value", other=[1, 2])]`. Parsed literal by literal; nothing is ever evaluated."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from weft.text.formats.json_calls import SPACE, json_calls
from weft.text.parts import as_json
from weft.text.reader import Malformed, Reader, Reading

MAX_DEPTH = 32
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\"/"}
# Numeric escapes, and their number of digits.
_CODES = {"x": 2, "u": 4, "U": 8}
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
# Longer words are neither names nor numbers.
_MAX_WORD = 400

Positions = Mapping[str, Sequence[str]]


def between(reader: Reader, start: str, end: str, positions: Positions) -> Reading:
    """Read content, and lists of calls between two markers."""
    while marker := (yield from reader.skip_to((start,), reader.content)):
        yield from reader.attempt(marker, _marked_calls(reader, end, positions))


def _marked_calls(reader: Reader, end: str, positions: Positions) -> Reading:
    yield from python_or_json(reader, positions)
    yield from reader.skip(SPACE)
    yield from reader.pass_by(end)


def fenced(reader: Reader, positions: Positions) -> Reading:
    """Read Gemma's format: calls in a code block of their own, as Python or as JSON."""
    fences = ("```tool_code", "```tool_call", "```json")
    while marker := (yield from reader.skip_to(fences, reader.content)):
        yield from reader.attempt(marker, _fenced_calls(reader, positions))


def _fenced_calls(reader: Reader, positions: Positions) -> Reading:
    yield from python_or_json(reader, positions, strict=True)
    yield from reader.skip(SPACE)
    yield from reader.pass_by("```")


def python_or_json(reader: Reader, positions: Positions, strict: bool = False) -> Reading:
    listed = (yield from reader.skip(SPACE)) == "["
    reader.place += listed
    if (yield from reader.skip(SPACE)) == "{":
        yield from json_calls(reader, strict=strict)
    else:
        yield from _python_calls(reader, positions)
    yield from reader.skip(SPACE)
    if listed:
        yield from reader.expect("]")


def _python_calls(reader: Reader, positions: Positions, printed: bool = False) -> Reading:
    """Read consecutive calls. `printed`: they are arguments of `print`, which may not be nested."""
    while _NAME.match((yield from reader.skip(SPACE)) or " "):
        name = yield from _word(reader)
        yield from reader.skip(SPACE)
        yield from reader.expect("(")
        if name == "print":
            if printed:
                raise Malformed
            yield from _python_calls(reader, positions, printed=True)
            yield from reader.expect(")")
        else:
            arguments = yield from _arguments(reader, positions.get(name, ()))
            try:
                text = as_json(arguments)
            except ValueError:
                raise Malformed from None
            reader.begin_call(name)
            reader.arguments(text)
        if (yield from reader.skip(SPACE)) in (",", ";"):
            reader.place += 1


def _arguments(reader: Reader, order: Sequence[str]) -> Generator[None, None, dict[str, Any]]:
    """Read up to the closing bracket. Positional arguments are named by the tool's order."""
    found: dict[str, Any] = {}
    while (first := (yield from reader.skip(SPACE))) != ")":
        value = yield from _value(reader, 0) if not _NAME.match(first or " ") else _word_or_key(reader)
        if isinstance(value, _Key):
            found[value.name] = yield from _value(reader, 0)
        elif len(found) < len(order):
            found[order[len(found)]] = value
        else:
            raise Malformed
        if (yield from reader.skip(SPACE)) == ",":
            reader.place += 1
        elif (yield from reader.peek()) != ")":
            raise Malformed
    reader.place += 1
    return found


class _Key:
    def __init__(self, name: str) -> None:
        self.name = name


def _word_or_key(reader: Reader) -> Generator[None, None, Any]:
    word = yield from _word(reader)
    if (yield from reader.skip(SPACE)) == "=":
        reader.place += 1
        return _Key(word)
    return _constant(word)


def _value(reader: Reader, depth: int) -> Generator[None, None, Any]:
    if depth > MAX_DEPTH:
        raise Malformed
    first = yield from reader.skip(SPACE)
    if first in ("'", '"'):
        return (yield from _string(reader, first))
    if first in ("[", "("):
        return (yield from _items(reader, "]" if first == "[" else ")", depth))
    if first == "{":
        return (yield from _members(reader, depth))
    return _constant((yield from _word(reader)))


def _items(reader: Reader, end: str, depth: int) -> Generator[None, None, list[Any]]:
    reader.place += 1
    found = []
    while (yield from reader.skip(SPACE)) != end:
        found.append((yield from _value(reader, depth + 1)))
        yield from _comma_or(reader, end)
    reader.place += 1
    return found


def _members(reader: Reader, depth: int) -> Generator[None, None, dict[str, Any]]:
    reader.place += 1
    found: dict[str, Any] = {}
    while (yield from reader.skip(SPACE)) != "}":
        key = yield from _value(reader, depth + 1)
        if isinstance(key, list | dict):
            raise Malformed
        yield from reader.skip(SPACE)
        yield from reader.expect(":")
        found[str(key)] = yield from _value(reader, depth + 1)
        yield from _comma_or(reader, "}")
    reader.place += 1
    return found


def _comma_or(reader: Reader, end: str) -> Reading:
    found = yield from reader.skip(SPACE)
    if found == ",":
        reader.place += 1
    elif found != end:
        raise Malformed


def _word(reader: Reader) -> Generator[None, None, str]:
    """Read a name or a number, up to the first character that cannot belong to either."""
    found: list[str] = []
    while (character := (yield from reader.peek())) and (character.isalnum() or character in "_.-+"):
        found.append(character)
        reader.place += 1
        if len(found) > _MAX_WORD:
            raise Malformed
    return "".join(found)


def _constant(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if not word or len(word) > _MAX_WORD:
        raise Malformed
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    raise Malformed


def _string(reader: Reader, quote: str) -> Generator[None, None, str]:
    """Read a string in single, double or triple quotes. Models break lines in any of them."""
    quotes = (yield from reader.sees(quote * 3)) or quote
    reader.place += len(quotes)
    pieces: list[str] = []
    while not (yield from reader.sees(quotes)):
        character = yield from reader.peek()
        if not character:
            raise Malformed
        reader.place += 1
        pieces.append((yield from _escape(reader)) if character == "\\" else character)
    reader.place += len(quotes)
    # Two halves of a character may have been escaped separately.
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(reader: Reader) -> Generator[None, None, str]:
    """Read an escape after its backslash. An unknown escape stands for itself, as in Python."""
    character = yield from reader.peek()
    reader.place += len(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character not in _CODES:
        return "\\" + character
    digits: list[str] = []
    while len(digits) < _CODES[character]:
        digits.append((yield from reader.peek()))
        if digits[-1] not in "0123456789abcdefABCDEF" or not digits[-1]:
            raise Malformed
        reader.place += 1
    code = int("".join(digits), 16)
    if code > 0x10FFFF:
        raise Malformed
    return chr(code)
