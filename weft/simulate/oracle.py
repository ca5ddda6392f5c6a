"""The most that any cache could reuse: every cell that was ever asked for, kept for ever, each with a state."""

from __future__ import annotations

from bisect import bisect_left

from weft.memory.keys import Key
from weft.simulate.text import Ask


class Oracle:
    """Its memory grows with all that was ever computed, not with what a cache holds."""

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.hit_tokens = 0
        self._seen: set[Key] = set()

    @property
    def cells(self) -> int:
        return len(self._seen)

    def look(self, ask: Ask) -> int:
        """How much of a prompt was computed before, in tokens; then it and its answer are known too."""
        keys, limit = ask.keys, (ask.prompt - 1) // self.cell
        depth = bisect_left(range(limit), True, key=lambda place: keys[place] not in self._seen)
        # The last token of an answer is never computed, so its cell may not be.
        self._seen.update(keys[depth : (ask.prompt + ask.answer - 1) // self.cell])
        self.hit_tokens += depth * self.cell
        return depth * self.cell
