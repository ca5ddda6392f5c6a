"""Finds stop strings in a text that arrives in pieces.

The output depends on the text alone, not on where it was split: characters are read one by one, a possible beginning of
a stop string is held back until it is refuted, and the stop string that is complete first ends the text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Pattern:
    text: str
    # fallback[n]: after n matching characters and a mismatch, how many still match (Knuth, Morris, Pratt).
    fallback: tuple[int, ...]

    def advance(self, matched: int, character: str) -> int:
        """Return how much of the pattern's beginning the text ends with, once `character` is read."""
        while matched and self.text[matched] != character:
            matched = self.fallback[matched]
        return matched + 1 if self.text[matched] == character else 0


def _pattern(text: str) -> _Pattern:
    fallback = [0] * (len(text) + 1)
    for end in range(1, len(text)):
        matched = fallback[end]
        while matched and text[matched] != text[end]:
            matched = fallback[matched]
        fallback[end + 1] = matched + 1 if text[matched] == text[end] else 0
    return _Pattern(text, tuple(fallback))


class StopStrings:
    """Watches one text. `feed` returns what may be shown; `found` is the stop string that ended it."""

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._patterns = [_pattern(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the part of the text so far that is certain to stay, beyond what was returned before."""
        if self.found is not None:
            return ""
        if not self._patterns:
            return text
        for count, character in enumerate(text, start=1):
            if self._read(character):
                return self._end(self._held + text[:count])
        seen = self._held + text
        shown = len(seen) - max(self._matched)
        self._held = seen[shown:]
        return seen[:shown]

    def skip(self, text: str) -> str:
        """Return text in which no stop string may begin or end, together with what was held back."""
        shown = self.flush() + text
        self._matched = [0] * len(self._patterns)
        return shown

    def flush(self) -> str:
        """Return what was held back: at the end of the text it is not the beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _read(self, character: str) -> bool:
        """Read one character; return whether a stop string is complete."""
        complete: list[str] = []
        for index, pattern in enumerate(self._patterns):
            self._matched[index] = matched = pattern.advance(self._matched[index], character)
            if matched == len(pattern.text):
                complete.append(pattern.text)
        if complete:
            # Of several that end together, the longest began first.
            self.found = max(complete, key=len)
        return bool(complete)

    def _end(self, seen: str) -> str:
        assert self.found is not None
        self._held = ""
        return seen if self._include else seen[: len(seen) - len(self.found)]
