"""Drafts from text that already exists: what followed the last tokens when they occurred before.

An occurrence is found by the last `KEY` tokens or their hash and then compared backwards, so a collision costs time and
never a wrong match. A fixed text (a prompt, a prediction) has a sorted array of hashes, 12 bytes a token; a growing one
has a dictionary that each token extends by one entry; finished texts share one table.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

# Tokens that must agree before a continuation is guessed.
KEY = 3
# Occurrences of one key that are compared, the latest first, and how far back.
MOST_COMPARED = 4
LONGEST_COMPARED = 32
# Tokens of a fixed text that are indexed, from its end.
MOST_INDEXED = 1 << 17
# Tokens of finished sequences that are kept for later ones, of all salts together, and of one sequence.
MOST_SHARED = 1 << 17
MOST_OF_ONE = 1 << 13
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


class FixedText:
    """Occurrences in a text that does not change. The index is made at the first question."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self.tokens = tokens
        # Where each run ends, in the order of `keys`.
        self._ends = array("i")

    @cached_property
    def keys(self) -> array[int]:
        """The keys of all runs, in order. Python's arrays: single values are read faster than from numpy."""
        if len(self.tokens) < KEY:
            return array("q")
        first = max(0, len(self.tokens) - MOST_INDEXED)
        keys = keys_of(self.tokens[first:])
        order = np.argsort(keys, kind="stable")
        self._ends = array("i", (order + first + KEY).astype(np.int32).tobytes())
        return array("q", keys[order].tobytes())

    def ends(self, key: int) -> list[int]:
        """Return the positions after the latest occurrences of a key, latest first."""
        found = self.keys
        high = bisect_right(found, key)
        low = max(0, high - MOST_COMPARED)
        return [self._ends[i] for i in range(high - 1, low - 1, -1) if found[i] == key]


class OwnText:
    """A sequence's prompt and what it has answered so far."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._prompt = FixedText(prompt)
        # The sequence's own list, not a copy: an answer only grows.
        self._answer: list[int] = []
        self._prompt_length = len(prompt)
        # The end of the last occurrence of a run of `KEY` tokens, and of the one before if there is one.
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, ...], int] = {}
        # Runs that end with the first tokens of the answer, up to this number, are indexed.
        self._indexed = max(0, KEY - 1 - len(prompt))

    def __len__(self) -> int:
        return self._prompt_length + len(self._answer)

    def extend(self, answer: list[int]) -> tuple[int, ...] | None:
        """Index what the answer, given in full, has grown by. Return its last `KEY` tokens, the `run` of other methods;
        None if there are too few for them to have occurred before."""
        self._answer, size = answer, self._prompt_length
        first, last = self._indexed + 1, len(answer) - 1
        if first <= last:
            # Except the last run: it is what is looked for.
            latest, before = self._latest, self._before
            tokens = answer[first - KEY : last] if first >= KEY else self.slice(size + first - KEY, size + last)
            for end, run in enumerate(zip(tokens, tokens[1:], tokens[2:]), size + first):
                if run in latest:
                    before[run] = latest[run]
                latest[run] = end
            self._indexed = last
        if last >= KEY:
            return answer[-3], answer[-2], answer[-1]
        return tuple(self.last(KEY)) if size + last >= KEY else None

    def last(self, count: int) -> list[int]:
        return self.slice(max(0, len(self) - count), len(self))

    def slice(self, start: int, end: int) -> list[int]:
        size = self._prompt_length
        if start >= size:
            return self._answer[start - size : end - size]
        return [*self._prompt.tokens[start:end].tolist(), *self._answer[: max(0, end - size)]]

    def recurs(self, run: tuple[int, ...], key: int) -> bool:
        """Return whether the last tokens, or others with their key, occurred before."""
        if run in self._latest:
            return True
        found = self._prompt.keys
        place = bisect_left(found, key)
        return place < len(found) and found[place] == key

    def match(self, run: tuple[int, ...], key: int, most: int) -> Match | None:
        """Return the longest earlier occurrence of the last tokens, and up to `most` tokens after it.

        Where the continuation reaches the end of the text, it goes on with itself: a loop is repeated.
        """
        own = [ends[run] for ends in (self._latest, self._before) if run in ends]
        ends = [*own, *self._prompt.ends(key)]
        if not ends:
            return None
        recent = self.last(LONGEST_COMPARED)
        before = ((end, self.slice(max(0, end - len(recent)), end)) for end in ends if end < len(self))
        best = longest(recent, before)
        if best is None:
            return None
        length, end = best
        tokens = self.slice(end, min(len(self), end + most))
        period = len(self) - end
        while len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        return Match(length, tuple(tokens))


class SharedTexts:
    """The ends of finished sequences, for later sequences with the same salt only. Bounded, oldest out first.

    A table of fixed size says where each run came last. Runs with the same hash overwrite each other, and nothing is
    taken out with a text: an entry counts only if its text is still there and has the right salt. So a finished
    sequence costs a few operations on arrays, however long it is.
    """

    def __init__(self, most: int = MOST_SHARED) -> None:
        self._most = most
        self._texts: OrderedDict[int, tuple[bytes, NDArray[np.int32]]] = OrderedDict()
        # By the highest bits of a run's key. About twice as many entries as tokens: few runs are lost to others.
        self._shift = 63 - most.bit_length()
        self._table = np.zeros(1 << most.bit_length(), np.int64)
        # Reads single entries, faster than numpy does.
        self._entries = self._table.data
        self._number = 0
        self.tokens = 0

    def add(self, salt: bytes, tokens: NDArray[np.int32]) -> None:
        tokens = tokens[-MOST_OF_ONE:].copy()
        if len(tokens) <= KEY:
            return
        self._number += 1
        self._texts[self._number] = salt, tokens
        self.tokens += len(tokens)
        # Of equal runs, the last one is assigned last. Nothing follows the last run of a text.
        places = (keys_of(tokens)[:-1] >> self._shift) ^ self._mark(salt)
        self._table[places] = (self._number << _PLACE_BITS) + np.arange(KEY, len(tokens), dtype=np.int64)
        while self.tokens > self._most:
            self.tokens -= len(self._texts.popitem(last=False)[1][1])

    def _mark(self, salt: bytes) -> int:
        """Return a number below the size of the table that salts differ in."""
        return crc32(salt) & len(self._table) - 1

    def place(self, salt: bytes, key: int) -> tuple[int, int] | None:
        """Return the latest occurrence of a key, or of one with the same hash, in the texts of this salt."""
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
        self._table[:] = 0
        self.tokens = 0


class Prediction:
    """The caller's guess at the whole answer. It is followed from its start, and found again after a difference."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self._text = FixedText(tokens)
        self._followed = 0  # tokens of the answer that were looked at
        self._at: int | None = 0  # where the prediction continues the answer

    def match(self, answer: list[int], most: int) -> Match | None:
        """Return the part of the prediction that continues the answer."""
        tokens = self._text.tokens
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
        ends = self._text.ends(key_of(*recent[-KEY:]))
        best = longest(recent, ((end, self._text.tokens[max(0, end - len(recent)) : end].tolist()) for end in ends))
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
