"""Tool calls as Python: `[name(key="value", other=[1, 2])]`. Parsed literal by literal; nothing is ever evaluated."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from weft.text.answer_parts import as_json
from weft.text.formats.json_calls import SPACE, json_calls
from weft.text.scanner import Malformed, Reading, Scanner

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


def between(scanner: Scanner, start: str, end: str, positions: Positions) -> Reading:
    """Read content, and lists of calls between two markers."""
    while marker := (yield from scanner.skip_to((start,), scanner.content)):
        yield from scanner.attempt(marker, _marked_calls(scanner, end, positions))


def _marked_calls(scanner: Scanner, end: str, positions: Positions) -> Reading:
    yield from python_or_json(scanner, positions)
    yield from scanner.skip(SPACE)
    yield from scanner.pass_by(end)


def fenced(scanner: Scanner, positions: Positions) -> Reading:
    """Read Gemma's format: calls in a code block of their own, as Python or as JSON."""
    fences = ("```tool_code", "```tool_call", "```json")
    while marker := (yield from scanner.skip_to(fences, scanner.content)):
        yield from scanner.attempt(marker, _fenced_calls(scanner, positions))


def _fenced_calls(scanner: Scanner, positions: Positions) -> Reading:
    yield from python_or_json(scanner, positions, strict=True)
    yield from scanner.skip(SPACE)
    yield from scanner.pass_by("```")


def python_or_json(scanner: Scanner, positions: Positions, strict: bool = False) -> Reading:
    listed = (yield from scanner.skip(SPACE)) == "["
    scanner.place += listed
    if (yield from scanner.skip(SPACE)) == "{":
        yield from json_calls(scanner, strict=strict)
    else:
        yield from _python_calls(scanner, positions)
    yield from scanner.skip(SPACE)
    if listed:
        yield from scanner.expect("]")


def _python_calls(scanner: Scanner, positions: Positions, printed: bool = False) -> Reading:
    """Read consecutive calls. `printed`: they are arguments of `print`, which may not be nested."""
    while _NAME.match((yield from scanner.skip(SPACE)) or " "):
        name = yield from _word(scanner)
        yield from scanner.skip(SPACE)
        yield from scanner.expect("(")
        if name == "print":
            if printed:
                raise Malformed
            yield from _python_calls(scanner, positions, printed=True)
            yield from scanner.expect(")")
        else:
            arguments = yield from _arguments(scanner, positions.get(name, ()))
            try:
                text = as_json(arguments)
            except ValueError:
                raise Malformed from None
            scanner.begin_call(name)
            scanner.arguments(text)
        if (yield from scanner.skip(SPACE)) in (",", ";"):
            scanner.place += 1


def _arguments(scanner: Scanner, order: Sequence[str]) -> Generator[None, None, dict[str, Any]]:
    """Read up to the closing bracket. Positional arguments are named by the tool's order."""
    found: dict[str, Any] = {}
    while (first := (yield from scanner.skip(SPACE))) != ")":
        value = yield from _value(scanner, 0) if not _NAME.match(first or " ") else _word_or_key(scanner)
        if isinstance(value, _Key):
            found[value.name] = yield from _value(scanner, 0)
        elif len(found) < len(order):
            found[order[len(found)]] = value
        else:
            raise Malformed
        if (yield from scanner.skip(SPACE)) == ",":
            scanner.place += 1
        elif (yield from scanner.peek()) != ")":
            raise Malformed
    scanner.place += 1
    return found


class _Key:
    def __init__(self, name: str) -> None:
        self.name = name


def _word_or_key(scanner: Scanner) -> Generator[None, None, Any]:
    word = yield from _word(scanner)
    if (yield from scanner.skip(SPACE)) == "=":
        scanner.place += 1
        return _Key(word)
    return _constant(word)


def _value(scanner: Scanner, depth: int) -> Generator[None, None, Any]:
    if depth > MAX_DEPTH:
        raise Malformed
    first = yield from scanner.skip(SPACE)
    if first in ("'", '"'):
        return (yield from _string(scanner, first))
    if first in ("[", "("):
        return (yield from _items(scanner, "]" if first == "[" else ")", depth))
    if first == "{":
        return (yield from _members(scanner, depth))
    return _constant((yield from _word(scanner)))


def _items(scanner: Scanner, end: str, depth: int) -> Generator[None, None, list[Any]]:
    scanner.place += 1
    found = []
    while (yield from scanner.skip(SPACE)) != end:
        found.append((yield from _value(scanner, depth + 1)))
        yield from _comma_or(scanner, end)
    scanner.place += 1
    return found


def _members(scanner: Scanner, depth: int) -> Generator[None, None, dict[str, Any]]:
    scanner.place += 1
    found: dict[str, Any] = {}
    while (yield from scanner.skip(SPACE)) != "}":
        key = yield from _value(scanner, depth + 1)
        if isinstance(key, list | dict):
            raise Malformed
        yield from scanner.skip(SPACE)
        yield from scanner.expect(":")
        found[str(key)] = yield from _value(scanner, depth + 1)
        yield from _comma_or(scanner, "}")
    scanner.place += 1
    return found


def _comma_or(scanner: Scanner, end: str) -> Reading:
    found = yield from scanner.skip(SPACE)
    if found == ",":
        scanner.place += 1
    elif found != end:
        raise Malformed


def _word(scanner: Scanner) -> Generator[None, None, str]:
    """Read a name or a number, up to the first character that cannot belong to either."""
    found: list[str] = []
    while (character := (yield from scanner.peek())) and (character.isalnum() or character in "_.-+"):
        found.append(character)
        scanner.place += 1
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
            value = kind(word)
        except ValueError:
            continue
        # JSON has no infinity, so a number that no float can hold becomes the largest one.
        return math.copysign(sys.float_info.max, value) if _overflows(value) and word[-1].isdigit() else value
    raise Malformed


def _overflows(value: float) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _string(scanner: Scanner, quote: str) -> Generator[None, None, str]:
    """Read a string in single, double or triple quotes. Models break lines in any of them."""
    quotes = (yield from scanner.sees(quote * 3)) or quote
    scanner.place += len(quotes)
    pieces: list[str] = []
    while not (yield from scanner.sees(quotes)):
        character = yield from scanner.peek()
        if not character:
            raise Malformed
        scanner.place += 1
        pieces.append((yield from _escape(scanner)) if character == "\\" else character)
    scanner.place += len(quotes)
    # Two halves of a character may have been escaped separately.
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(scanner: Scanner) -> Generator[None, None, str]:
    """Read an escape after its backslash. An unknown escape stands for itself, as in Python."""
    character = yield from scanner.peek()
    scanner.place += len(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character not in _CODES:
        return "\\" + character
    digits: list[str] = []
    while len(digits) < _CODES[character]:
        digits.append((yield from scanner.peek()))
        if digits[-1] not in "0123456789abcdefABCDEF" or not digits[-1]:
            raise Malformed
        scanner.place += 1
    code = int("".join(digits), 16)
    if code > 0x10FFFF:
        raise Malformed
    return chr(code)
