"""Drafts from text that already exists: what followed the last tokens when they occurred before.

A sequence's own text, and a prediction, are searched from their end whenever they are asked: nothing has to be done for
a token that is never asked about. Finished texts share one table, which is searched by a hash; what it finds is
compared, so a collision costs time and never makes a wrong match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

# Tokens that must agree before a continuation is drafted.
KEY = 3
# Occurrences of one key that are compared, the latest first, and how far back.
MOST_COMPARED = 4
LONGEST_COMPARED = 32
# Tokens of a text that are searched, from its end: at first a few, then more as long as too few occurrences are found.
MOST_SEARCHED, SEARCHED_FIRST, SEARCHED_MORE = 1 << 17, 1 << 12, 4
# Occurrences of a single token that are looked at one by one.
FEW = 32
# Room for the first tokens of an answer; it doubles.
ROOM = 1 << 8
# Tokens of finished sequences that are kept for later ones, of all salts together, and of one sequence.
MOST_SHARED = 1 << 17
MOST_OF_ONE = 1 << 13
# Tokens of finished sequences that are entered together at the latest, which takes less than a millisecond.
MOST_WAITING = 1 << 15
# Bits of a position in such a text, whose end is one.
_PLACE_BITS = 14
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the last tokens: how many agree, and what followed."""

    length: int
    tokens: tuple[int, ...]


def key_of(a: int, b: int, c: int) -> int:
    """Return the hash of three tokens; the same as `keys_of` computes for an array."""
    return (((a * _FACTOR + b) * _FACTOR + c) * _FACTOR & _MASK) >> 1


def keys_of(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the keys of all runs of `KEY` tokens: entry i is the run that ends before position i + KEY.
    >>> int(keys_of(np.array([5, 6, 7], np.int32))[0]) == key_of(5, 6, 7)
    True
    """
    wide = tokens.astype(np.uint64)
    factor = np.uint64(_FACTOR)
    with np.errstate(over="ignore"):
        found = ((wide[:-2] * factor + wide[1:-1]) * factor + wide[2:]) * factor
    return (found >> np.uint64(1)).astype(np.int64)


def ends_of(tokens: NDArray[np.int32], run: tuple[int, ...]) -> list[int]:
    """Return the positions after the latest occurrences of a run of `KEY` tokens in a text, latest first.

    >>> ends_of(np.array([1, 2, 3, 9, 1, 2, 3, 4], np.int32), (1, 2, 3))
    [7, 3]
    """
    found: list[int] = []
    end, size = len(tokens), SEARCHED_FIRST
    least = max(0, end - MOST_SEARCHED)
    while end - least >= KEY and len(found) < MOST_COMPARED:
        start = max(least, end - size)
        found += [start + place for place in _ends_in(tokens[start:end], *run)]
        # The next part ends where a run may begin that this one does not have.
        end, size = start + KEY - 1 if start > least else least, SEARCHED_MORE * size
    return found[:MOST_COMPARED]


def _ends_in(part: NDArray[np.int32], first: int, second: int, third: int) -> list[int]:
    """Return the positions after the latest occurrences of three tokens, latest first."""
    places = (part[2:] == third).nonzero()[0]
    if len(places) > FEW:
        places = ((part[2:] == third) & (part[1:-1] == second) & (part[:-2] == first)).nonzero()[0][-MOST_COMPARED:]
    return [at + KEY for at in reversed(places.tolist()) if part[at + 1] == second and part[at] == first]


class OwnText:
    """A sequence's prompt and what it has answered so far: the last `MOST_SEARCHED` tokens of the former."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._tokens = prompt[-MOST_SEARCHED:]
        self._prompt_length = self._length = len(self._tokens)
        # Where the last tokens came before, as of this length.
        self._ends: list[int] = []
        self._searched = 0

    def extend(self, answer: list[int]) -> tuple[int, ...] | None:
        """Add what the answer, given in full, has grown by. Return the last `KEY` tokens of the text; None if there are
        too few for them to have occurred before."""
        length = self._prompt_length + len(answer)
        if length > self._length:
            if length > len(self._tokens):
                grown = np.empty(self._prompt_length + max(ROOM, 2 * len(answer)), np.int32)
                grown[: self._length] = self._tokens[: self._length]
                self._tokens = grown
            self._tokens[self._length : length] = answer[self._length - self._prompt_length :]
            self._length = length
        return tuple(self.last(KEY)) if length > KEY else None

    def last(self, count: int) -> list[int]:
        return self._slice(max(0, self._length - count), self._length)

    def _slice(self, start: int, end: int) -> list[int]:
        found: list[int] = self._tokens[start:end].tolist()
        return found

    def recurs(self, run: tuple[int, ...]) -> bool:
        """Return whether the last tokens, given as `run`, occurred before."""
        if self._searched != self._length:
            self._searched = self._length
            # Except at the end: that is what is looked for.
            self._ends = ends_of(self._tokens[: self._length - 1], run)
        return bool(self._ends)

    def match(self, run: tuple[int, ...], most: int) -> Match | None:
        """Return the longest earlier occurrence of the last tokens, and up to `most` tokens after it.

        Where the continuation reaches the end of the text, it goes on with itself: a loop is repeated.
        """
        if not self.recurs(run):
            return None
        recent = self.last(LONGEST_COMPARED)
        best = longest(recent, ((end, self._slice(max(0, end - len(recent)), end)) for end in self._ends))
        if best is None:
            return None
        length, end = best
        tokens = self._slice(end, min(self._length, end + most))
        period = self._length - end
        while len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        return Match(length, tuple(tokens))


class SharedTexts:
    """The ends of finished sequences, for later sequences with the same salt only. Bounded, oldest out first.

    A table of fixed size says where each run came last. Runs with the same hash overwrite each other, and nothing is
    taken out with a text: an entry counts only if its text is still there and has the right salt. Texts are entered
    when the table is asked, all that ended since then together: a few operations on arrays, however many they are.
    """

    def __init__(self, most: int = MOST_SHARED) -> None:
        self._most = most
        self._texts: OrderedDict[int, tuple[bytes, NDArray[np.int32]]] = OrderedDict()
        # By the highest bits of a run's key. About twice as many entries as tokens: few runs are lost to others.
        self._shift = 63 - most.bit_length()
        # Written once, so that the system provides its memory now and not page by page in the steps.
        self._table = np.empty(1 << most.bit_length(), np.int64)
        self._table[:] = 0
        # Reads single entries, faster than numpy does.
        self._entries = self._table.data
        self._number = 0
        self.tokens = 0
        # Texts that the table does not have yet, and their tokens.
        self._waiting: list[int] = []
        self._waiting_tokens = 0

    def add(self, salt: bytes, tokens: NDArray[np.int32]) -> None:
        tokens = tokens[-MOST_OF_ONE:].copy()
        if len(tokens) <= KEY:
            return
        self._number += 1
        self._texts[self._number] = salt, tokens
        self.tokens += len(tokens)
        while self.tokens > self._most:
            self.tokens -= len(self._texts.popitem(last=False)[1][1])
        self._waiting.append(self._number)
        self._waiting_tokens += len(tokens)
        if self._waiting_tokens >= MOST_WAITING:
            self._enter()

    def _enter(self) -> None:
        """Enter the texts that wait into the table."""
        waiting = [(number, *self._texts[number]) for number in self._waiting if number in self._texts]
        self._waiting, self._waiting_tokens = [], 0
        if not waiting:
            return
        lengths = [len(tokens) for _, _, tokens in waiting]
        firsts = [0, *accumulate(lengths[:-1])]
        # The place in its text of every token that follows a run. Those of a text's first tokens follow none.
        place = np.arange(sum(lengths)) - np.repeat(firsts, lengths)
        follows = place >= KEY
        keys = keys_of(np.concatenate([tokens for _, _, tokens in waiting]))[:-1][follows[KEY:]] >> self._shift
        entries = np.repeat([number << _PLACE_BITS for number, _, _ in waiting], lengths) + place
        marks = np.repeat([self._mark(salt) for _, salt, _ in waiting], lengths)
        # Of equal runs, the last one is assigned last.
        self._table[keys ^ marks[follows]] = entries[follows]

    def _mark(self, salt: bytes) -> int:
        """Return a number below the size of the table that salts differ in."""
        return crc32(salt) & len(self._table) - 1

    def place(self, salt: bytes, key: int) -> tuple[int, int] | None:
        """Return the latest occurrence of a key, or of one with the same hash, in the texts of this salt."""
        if self._waiting:
            self._enter()
        number, end = divmod(self._entries[key >> self._shift ^ self._mark(salt)], 1 << _PLACE_BITS)
        text = self._texts.get(number)
        return None if text is None or text[0] != salt else (number, end)

    def agrees(self, place: tuple[int, int], recent: list[int]) -> bool:
        """Return whether all of these tokens, not only a key, are at this place."""
        number, end = place
        return end >= len(recent) and self._texts[number][1][end - len(recent) : end].tolist() == recent

    def match(self, place: tuple[int, int], recent: list[int], most: int) -> Match | None:
        """Return what followed the last tokens at this place."""
        number, end = place
        tokens = self._texts[number][1]
        best = longest(recent, [(end, tokens[max(0, end - len(recent)) : end].tolist())])
        return None if best is None else Match(best[0], tuple(tokens[end : end + most].tolist()))

    def clear(self) -> None:
        self._texts.clear()
        self._waiting.clear()
        self._table[:] = 0
        self.tokens = self._waiting_tokens = 0


class Prediction:
    """The answer that the caller expects. It is followed from its start, and found again after a difference."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self._tokens = tokens
        self._followed = 0  # tokens of the answer that were looked at
        self._at: int | None = 0  # where the prediction continues the answer

    def match(self, answer: list[int], most: int) -> Match | None:
        """Return the part of the prediction that continues the answer."""
        tokens = self._tokens
        for token in answer[self._followed :]:
            follows = self._at is not None and self._at < len(tokens) and int(tokens[self._at]) == token
            self._at = self._at + 1 if follows and self._at is not None else None
        self._followed = len(answer)
        if self._at is None:
            self._at = self._find(answer)
        if self._at is None or self._at >= len(tokens):
            return None
        return Match(LONGEST_COMPARED, tuple(tokens[self._at : self._at + most].tolist()))

    def _find(self, answer: list[int]) -> int | None:
        recent = answer[-LONGEST_COMPARED:]
        if len(recent) < KEY:
            return None
        ends = ends_of(self._tokens, tuple(recent[-KEY:]))
        best = longest(recent, ((end, self._tokens[max(0, end - len(recent)) : end].tolist()) for end in ends))
        return None if best is None else best[1]


def longest(recent: list[int], places: Iterable[tuple[int, list[int]]]) -> tuple[int, int] | None:
    """Return the length of the longest agreement with `recent`, and its place; the first one, if several agree as far.

    `places` are positions and the tokens before them. Agreements shorter than a key are chance.

    >>> longest([1, 2, 3, 4], [(9, [2, 3, 4]), (5, [1, 2, 3, 4])])
    (4, 5)
    """
    best: tuple[int, int] | None = None
    for end, before in places:
        if before == recent and len(recent) >= KEY:
            # Nothing agrees further.
            return len(recent), end
        length = 0
        for one, other in zip(reversed(recent), reversed(before)):
            if one != other:
                break
            length += 1
        if length >= KEY and (best is None or length > best[0]):
            best = length, end
    return best
