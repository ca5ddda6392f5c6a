"""Reads a text that arrives in pieces as if it were whole.

A format is a generator that reads from here and yields whenever the text so far does not determine how it continues.
Formats are therefore written like parsers of a whole text, and their result depends on the text alone, not on where it
was split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from weft.text.answer_parts import AnswerPart, call_id, is_text

# Maximum text of one call to hold back before it is certain that it is a call.
MAX_HELD = 1 << 18
MAX_CALLS = 128

Reading = Generator[None, None, None]
# Runs of characters that change nothing: between strings, inside a string, and in a number or a word.
_PLAIN = re.compile(r'[^"{}\[\]]*')
_INSIDE = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[^\s,:;\[\]{}\"]*")
_ESCAPE = re.compile(r"\\.", re.DOTALL)


class Malformed(Exception):
    """The text does not match the format."""


def without_space(text: str, held: list[str]) -> str:
    """Return a text preceded by the whitespace held back before it, without its trailing whitespace, now held back.

    `held` is a list, because a model may write whitespace for ever, a token at a time.

    >>> held = [" ", "\\n"]
    >>> without_space("a ", held), held
    (' \\na', [' '])
    """
    kept = text.rstrip()
    if not kept:
        held.append(text)
        return ""
    found = "".join([*held, kept])
    held[:] = [text[len(kept) :]] if len(kept) < len(text) else []
    return found


class JsonPieces:
    """Passes pieces of a JSON value on, while they can be JSON: no tag outside strings, no line break inside them."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._quoted = False

    def __call__(self, piece: str) -> None:
        if piece == '"':
            self._quoted = not self._quoted
        elif ("\n" if self._quoted else "<") in piece:
            raise Malformed
        self._show(piece)


class Scanner:
    """The text so far, the position up to which it is read, and the parts found in it."""

    def __init__(self, make_id: Callable[[], str] = call_id) -> None:
        self.text = ""
        self.place = 0
        self.ended = False
        self.parts: list[AnswerPart] = []
        self.calls = 0
        self._make_id = make_id
        self._space: list[str] = []
        self._start: int | None = None

    # output -----------------------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Add content. Its trailing whitespace is held back: next to calls it is dropped."""
        kept = without_space(text, self._space)
        if kept:
            self.parts.append(AnswerPart("content", kept))

    def reasoning(self, text: str) -> None:
        if text:
            self.parts.append(AnswerPart("reasoning", text))

    def begin_call(self, name: str) -> None:
        if self.calls >= MAX_CALLS or not name or not is_text(name):
            raise Malformed
        self._space.clear()
        self._start = None  # this text cannot become content any more
        self.parts.append(AnswerPart("tool_call", "", self.calls, self._make_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add arguments to the last call."""
        if text:
            self.parts.append(AnswerPart("tool_call", text, self.calls - 1))

    def last_space(self) -> None:
        if self._space and not self.calls:
            self.parts.append(AnswerPart("content", "".join(self._space)))
        self._space.clear()

    # reading ----------------------------------------------------------------------------------------------------------

    def feed(self, text: str) -> None:
        """Append to the text. Drops what is already read, so that a token costs the same however long the text is."""
        self._forget()
        self.text += text

    @property
    def held(self) -> int:
        """Number of characters that may still become content: of a call that has not begun, up to a bound."""
        return 0 if self._start is None else len(self.text) - self._start

    def more(self) -> Generator[None, None, bool]:
        """Wait for text; return whether there is more."""
        if self.held > MAX_HELD:
            raise Malformed
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """Return the next character, or an empty string at the end."""
        while self.place >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.place]

    def skip(self, characters: str, show: Callable[[str], None] | None = None) -> Generator[None, None, str]:
        """Skip any of these characters and show them; return the character after them."""
        while True:
            begin = self.place
            while self.place < len(self.text) and self.text[self.place] in characters:
                self.place += 1
            if show is not None:
                show(self.text[begin : self.place])
            if self.place < len(self.text):
                return self.text[self.place]
            if not (yield from self.more()):
                return ""

    def expect(self, wanted: str) -> Reading:
        """Read exactly this text."""
        if not (yield from self.sees(wanted)):
            raise Malformed
        self.place += len(wanted)

    def sees(self, *wanted: str) -> Generator[None, None, str]:
        """Return which of these texts comes next, if any; the longest, if several do."""
        while True:
            rest = self.text[self.place : self.place + max(map(len, wanted))]
            undecided = [each for each in wanted if len(each) > len(rest) and each.startswith(rest)]
            if not undecided or not (yield from self.more()):
                return max((each for each in wanted if rest.startswith(each)), key=len, default="")

    def pass_by(self, *wanted: str) -> Reading:
        """Skip one of these texts if it comes next."""
        found = yield from self.sees(*wanted)
        self.place += len(found)

    def skip_to(self, markers: tuple[str, ...], show: Callable[[str], None]) -> Generator[None, None, str]:
        """Show everything up to the first marker and skip the marker; return it, or an empty string at the end of the
        text.

        No marker may contain another.
        """
        while True:
            found = [(at, marker) for marker in markers if (at := self.text.find(marker, self.place)) >= 0]
            at, marker = min(found, default=(self._certain(markers), ""))
            show(self.text[self.place : at])
            self.place = at + len(marker)
            if marker:
                return marker
            self._forget()
            if not (yield from self.more()):
                show(self.text[self.place :])
                self.place = len(self.text)
                return ""

    def _certain(self, markers: tuple[str, ...]) -> int:
        """Return the position before which no marker can begin any more, whatever follows."""
        for at in range(max(self.place, len(self.text) - max(map(len, markers)) + 1), len(self.text)):
            if any(marker.startswith(self.text[at:]) for marker in markers):
                return at
        return len(self.text)

    def _forget(self) -> None:
        """Drop what is read, unless it may still become content."""
        if self._start is None:
            self.text, self.place = self.text[self.place :], 0

    @contextmanager
    def rereadable(self) -> Iterator[int]:
        """Keep the text from here on; yields the position to return to. As for a call, what is kept is bounded."""
        self._start = self.place
        try:
            yield self.place
        finally:
            self._start = None

    def attempt(self, marker: str, calls: Reading) -> Reading:
        """Read what follows a marker as calls. If no call begins, everything read is content."""
        before, start = self.calls, self.place - len(marker)
        self._start = start
        try:
            yield from calls
        except Malformed:
            pass
        finally:
            self._start = None
        if self.calls == before:
            self.content(self.text[start : self.place])

    # JSON -------------------------------------------------------------------------------------------------------------

    def json_string(self) -> Generator[None, None, str]:
        """Read a string and return its value."""
        if (yield from self.peek()) != '"':
            raise Malformed
        try:
            return str(json.loads((yield from self.json_value())))
        except ValueError:
            raise Malformed from None

    def json_value(self) -> Generator[None, None, str]:
        """Read a value and return it verbatim. Only its brackets and quotes are matched."""
        pieces: list[str] = []
        yield from self.json_stream(pieces.append)
        return "".join(pieces)

    def json_stream(self, show: Callable[[str], None]) -> Reading:
        """Read a value and show it as it arrives."""
        depth, pattern = 0, _PLAIN
        first = yield from self.peek()
        if first not in ("{", "[", '"'):
            yield from self._run(_SCALAR, show)
            return
        while True:
            yield from self._run(pattern, show)
            if not (yield from self.peek()):
                raise Malformed
            character = self.text[self.place]
            if character == "\\":
                yield from self._run(_ESCAPE, show, least=2)
                continue
            self.place += 1
            show(character)
            if character == '"':
                pattern = _PLAIN if pattern is _INSIDE else _INSIDE
            else:
                depth += (character in "{[") - (character in "}]")
            if depth == 0 and pattern is _PLAIN:
                return

    def _run(self, pattern: re.Pattern[str], show: Callable[[str], None], least: int = 1) -> Reading:
        """Show everything from here on that the pattern matches."""
        while True:
            if len(self.text) - self.place < least:
                if not (yield from self.more()):
                    if least > 1:
                        raise Malformed
                    return
                continue
            found = pattern.match(self.text, self.place)
            assert found is not None
            show(found.group())
            self.place = found.end()
            if self.place < len(self.text) or least > 1:
                return
            self._forget()
