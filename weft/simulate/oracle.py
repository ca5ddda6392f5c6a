"""The upper bound of any cache: every cell that was ever requested is kept for ever, each with a state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from weft.memory.keys import Key
from weft.memory.spec import MemorySpec
from weft.simulate.sessions import SimulatedSession
from weft.simulate.text import SimulatedRequest


class Oracle:
    """Grows with everything that was ever computed, unlike a cache."""

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.hit_tokens = 0
        self._seen: set[Key] = set()

    @property
    def cells(self) -> int:
        return len(self._seen)

    def look(self, ask: SimulatedRequest) -> int:
        """Return how much of a prompt was computed before, in tokens; then add it and its answer."""
        keys, limit = ask.keys, (ask.prompt - 1) // self.cell
        depth = bisect_left(range(limit), True, key=lambda place: keys[place] not in self._seen)
        # The last token of an answer is never computed, so its cell may not be.
        self._seen.update(keys[depth : (ask.prompt + ask.answer - 1) // self.cell])
        self.hit_tokens += depth * self.cell
        return depth * self.cell


def survey(sessions: Iterator[SimulatedSession], cell: int) -> Survey:
    """Return the size of a workload without running it."""
    oracle, requests, prompt = Oracle(cell), 0, 0
    for session in sessions:
        for _, ask in session.turns:
            oracle.look(ask)
            requests += 1
            prompt += ask.prompt
    return Survey(requests, prompt, oracle.cells, oracle.hit_tokens)


@dataclass(frozen=True, slots=True)
class Survey:
    """A workload in numbers. Sessions are counted one after the other, as if they did not overlap."""

    requests: int
    prompt_tokens: int
    distinct_cells: int
    oracle_tokens: int

    def working_set_bytes(self, spec: MemorySpec) -> int:
        """Return the bytes of the pages of every distinct cell, and of one resume point for every request."""
        point = spec.state_bytes + spec.window_cells * spec.window_page_bytes
        return self.distinct_cells * spec.page_bytes + self.requests * point
