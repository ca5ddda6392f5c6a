"""Prompts that are never written out: stretches of text known by number and length, and the keys of their cells.

Two texts have the same key for a cell exactly if they consist of the same stretches up to its end, which is all that a
cache can know. Nothing here knows tokens; `tokens` invents some for an engine that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.memory.keys import Key

Stretch = tuple[int, int]  # its number, and its number of tokens
MASK = (1 << 64) - 1


class Text:
    """Grows at its end; `keys` are the keys of the full cells. Forks share their common prefix."""

    __slots__ = ("_name", "_open", "cell", "keys", "length", "marks", "stretches")

    def __init__(self, cell: int, stretches: Iterable[Stretch] = ()) -> None:
        self.cell = cell
        self.length = 0
        self.keys: list[Key] = []
        self.marks: list[int] = []  # where stretches end
        self.stretches: list[Stretch] = []
        self._name = cell
        self._open: tuple[int, ...] = ()  # (stretch, offset, count) of the last, unfinished cell
        for number, count in stretches:
            self.append(number, count)

    def append(self, number: int, count: int) -> None:
        """Append the first `count` tokens of a stretch."""
        cell, name, offset = self.cell, self._name, 0
        room = cell - self.length % cell
        while count - offset >= room:
            # The hash of a tuple of integers is the same in every process.
            name = hash((name, *self._open, number, offset, room)) if self._open else hash((name, number, offset))
            self.keys.append((name & MASK).to_bytes(8, "little"))
            offset += room
            room, self._open = cell, ()
        if count > offset:
            self._open = (*self._open, number, offset, count - offset)
        self._name = name
        self.length += count
        self.marks.append(self.length)
        self.stretches.append((number, count))

    def fork(self) -> Text:
        other = Text(self.cell)
        other.length, other._name, other._open = self.length, self._name, self._open
        other.keys, other.marks, other.stretches = list(self.keys), list(self.marks), list(self.stretches)
        return other


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request of the simulation: the keys of its cells (with the answer), lengths in tokens, and declared points.

    `boundaries` are ends of messages inside the prompt, `declared` positions that the caller wants kept.
    """

    keys: list[Key]
    prompt: int
    answer: int
    stretches: tuple[Stretch, ...] = ()
    boundaries: tuple[int, ...] = ()
    declared: tuple[int, ...] = ()


def simulated_request(text: Text, number: int, answer: int, declared: tuple[int, ...] = ()) -> SimulatedRequest:
    """Return a request for an answer to the text so far, and append the answer (stretch `number`) to the text."""
    prompt, boundaries, stretches = text.length, tuple(text.marks[:-1]), tuple(text.stretches)
    text.append(number, answer)
    return SimulatedRequest(list(text.keys), prompt, answer, stretches, boundaries, declared)


def tokens(stretches: Iterable[Stretch], vocabulary: int) -> NDArray[np.int32]:
    """Return tokens for an engine that needs some: every stretch is a fixed random text of its own."""
    parts = [np.random.default_rng(number & MASK).integers(3, vocabulary, count) for number, count in stretches]
    return np.concatenate(parts).astype(np.int32)
