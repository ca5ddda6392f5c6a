"""`pattern` of a JSON schema as a regular expression of a grammar.

A schema's pattern is one of JavaScript, found anywhere in a string; a grammar's is one of Rust, for a whole string.
What has no exact translation (lookaround, back references, anchors in the middle) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PATTERN_DEPTH = 16
_ANY = r"[\x{0}-\x{10FFFF}]*"
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{1,9})?)?\}")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
# As in JavaScript, digits and letters are those of ASCII. Inside the brackets of a class.
_SETS = {
    "d": "0-9",
    "D": "[^0-9]",
    "w": "0-9A-Za-z_",
    "W": "[^0-9A-Za-z_]",
    "s": r"\s\x{FEFF}",
    "S": r"[^\s\x{FEFF}]",
}


@dataclass(frozen=True, slots=True)
class Translated:
    """A regular expression for whole strings. `size` is the number of characters in it, repetitions written out."""

    regex: str
    size: int


def translate(pattern: str) -> Translated:
    """Return the strings in which a pattern is found. Raises ValueError, with the reason, if that is not possible.

    >>> translate("^a+$").regex, translate("b").size
    ('(?:(?:a+))', 1)
    """
    reader = _Reader(pattern)
    found = reader.alternatives(0)
    if reader.next():
        raise ValueError("it has an unbalanced parenthesis")
    return found


class _Reader:
    """Reads a pattern once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def next(self) -> str:
        return self._text[self._place : self._place + 1]

    def _take(self) -> str:
        found = self.next()
        if not found:
            raise ValueError("it ends too early")
        self._place += 1
        return found

    def alternatives(self, depth: int) -> Translated:
        if depth > MAX_PATTERN_DEPTH:
            raise ValueError(f"it is nested more than {MAX_PATTERN_DEPTH} levels deep")
        branches = [self._branch(depth)]
        while self.next() == "|":
            self._place += 1
            branches.append(self._branch(depth))
        return Translated(f"(?:{'|'.join(each.regex for each in branches)})", sum(each.size for each in branches))

    def _branch(self, depth: int) -> Translated:
        """Read up to the next alternative. Anchors are allowed at its ends, outside of all groups."""
        opened = depth == 0 and self.next() == "^"
        closed = False
        self._place += opened
        written, size = [], 0
        while self.next() not in ("", "|", ")"):
            if self.next() == "$":
                self._place += 1
                closed = depth == 0 and self.next() in ("", "|")
                if not closed:
                    raise ValueError("'$' is supported at the end only")
                break
            item = self._repeated(self._atom(depth))
            written.append(item.regex)
            size += item.size
        regex = f"(?:{''.join(written)})"
        if depth == 0:
            regex = ("" if opened else _ANY) + regex + ("" if closed else _ANY)
        return Translated(regex, size)

    def _atom(self, depth: int) -> Translated:
        character = self._take()
        match character:
            case "(":
                return self._group(depth)
            case "[":
                return Translated(self._class(), 1)
            case ".":
                return Translated(r"[^\n\r\x{2028}\x{2029}]", 1)
            case "\\":
                kind = self.next()
                return Translated(f"[{_SETS[self._take()]}]" if kind in _SETS else _code(self._escaped()), 1)
            case "^":
                raise ValueError("'^' is supported at the start only")
            case "*" | "+" | "?" | "{" if character != "{" or _COUNT.match(self._text, self._place - 1):
                raise ValueError(f"{character!r} has nothing to repeat")
        return Translated(_code(character), 1)

    def _group(self, depth: int) -> Translated:
        if self.next() == "?" and not self._text.startswith("?:", self._place):
            raise ValueError("of groups with '(?', only '(?:' is supported")
        self._place += 2 * (self.next() == "?")
        found = self.alternatives(depth + 1)
        if self._take() != ")":
            raise ValueError("it has an unbalanced parenthesis")
        return found

    def _repeated(self, item: Translated) -> Translated:
        """Read how often the item may come. Whether it is taken greedily does not change which strings there are."""
        counted = _COUNT.match(self._text, self._place)
        if counted is not None:
            self._place = counted.end()
            least, most = int(counted[1]), int(counted[3] or counted[1])
            if most < least:
                raise ValueError(f"{counted[0]} has its numbers in the wrong order")
            item = Translated(f"(?:{item.regex}){counted[0]}", item.size * max(1, most))
        elif self._text.startswith(("*", "+", "?"), self._place):
            item = Translated(item.regex + self._take(), item.size)
        else:
            return item
        if self.next() == "?":
            self._place += 1
        if self._text.startswith(("*", "+", "?"), self._place) or _COUNT.match(self._text, self._place):
            raise ValueError("it repeats a repetition")
        return item

    def _class(self) -> str:
        """Read the rest of a class of characters."""
        negated = self.next() == "^"
        self._place += negated
        written: list[str] = []
        while self.next() != "]":
            low = self._member()
            ranged = self._text.startswith("-", self._place) and not self._text.startswith("-]", self._place)
            if ranged and len(low) == 1:
                self._place += 1
                high = self._member()
                if len(high) != 1 or high < low:
                    raise ValueError("it has a range without two ends in order")
                written.append(f"{_code(low)}-{_code(high)}")
            else:
                written.append(_code(low) if len(low) == 1 else low)
        self._place += 1
        if not written:
            raise ValueError("it has an empty class of characters")
        return f"[{'^' * negated}{''.join(written)}]"

    def _member(self) -> str:
        """Return one character of a class, or a set of several as an expression."""
        character = self._take()
        if character != "\\":
            return character
        kind = self.next()
        if kind == "b":
            self._place += 1
            return "\b"
        return _SETS[self._take()] if kind in _SETS else self._escaped()

    def _escaped(self) -> str:
        """Return the character that follows a backslash stands for."""
        kind = self._take()
        if kind in _CONTROLS and not (kind == "0" and self.next().isdigit()):
            return _CONTROLS[kind]
        digits = {"x": 2, "u": 4}.get(kind)
        if digits is not None:
            code = self._text[self._place : self._place + digits]
            if not re.fullmatch(rf"[0-9A-Fa-f]{{{digits}}}", code) or 0xD800 <= int(code, 16) < 0xE000:
                raise ValueError(f"'\\{kind}' needs {digits} hexadecimal digits of a character")
            self._place += digits
            return chr(int(code, 16))
        if kind.isascii() and kind.isalnum():
            raise ValueError(f"'\\{kind}' is not supported")
        return kind


def _code(character: str) -> str:
    """Return a character as a regular expression, inside or outside of a class."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
