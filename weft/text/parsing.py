"""A parser of answers: takes text as it is sampled, returns parts. Formats define what it looks for."""

from __future__ import annotations

from weft.text.answer_parts import AnswerPart, joined
from weft.text.scanner import Reading, Scanner


class TextParser:
    """`markers` are special tokens that the format needs to see in the text."""

    def __init__(self, scanner: Scanner, reading: Reading, markers: tuple[str, ...] = ()) -> None:
        self.markers = markers
        self._scanner = scanner
        self._reading = reading

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that the text so far makes certain, beyond those returned before."""
        if text:
            self._scanner.feed(text)
            self._read()
        return self._take_parts()

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts: no text follows."""
        self._scanner.ended = True
        self._read()
        self._scanner.last_space()
        return self._take_parts()

    def _read(self) -> None:
        next(self._reading, None)

    def _take_parts(self) -> list[AnswerPart]:
        parts, self._scanner.parts = self._scanner.parts, []
        return joined(parts)
