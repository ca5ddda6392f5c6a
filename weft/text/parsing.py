"""A parser of answers: takes text as it is sampled, returns parts. Formats define what it looks for."""

from __future__ import annotations

from weft.text.parts import AnswerPart, joined
from weft.text.reader import Reader, Reading


class TextParser:
    """`markers` are special tokens that the format needs to see in the text."""

    def __init__(self, reader: Reader, reading: Reading, markers: tuple[str, ...] = ()) -> None:
        self.markers = markers
        self._reader = reader
        self._reading = reading

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that the text so far makes certain, beyond those returned before."""
        if text:
            self._reader.feed(text)
            self._read()
        return self._told()

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts: no text follows."""
        self._reader.ended = True
        self._read()
        self._reader.last_space()
        return self._told()

    def _read(self) -> None:
        next(self._reading, None)

    def _told(self) -> list[AnswerPart]:
        parts, self._reader.parts = self._reader.parts, []
        return joined(parts)
