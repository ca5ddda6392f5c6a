"""Costs of steps, learned while serving: they decide how many drafts pay, and how long prompt chunks may be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import inf
from typing import Protocol

# Durations kept of each size, and how many must be known before they count.
KEPT = 8
NEEDED = 2
# Of the steps without drafts of a size that is known well, one in this number is measured: it takes the host as long as
# all else that such a step does for drafts. Not a multiple of the steps between two questions for drafts.
MEASURED_OF = 5
# Drafts of a step that are tried before any were measured: this number, or one for each group of rows.
TRIED, TRIED_OF = 3, 8
# How many times as many as were measured are tried then.
GROWS = 4
# Steps after which the costs of drafts, and of the steps that they are compared with, are learned anew.
FORGET_AFTER = 2048
# Weight of the past in the costs of prompt chunks, and how many times its prediction a chunk may count for.
CHUNK_MEMORY = 0.9
MOST_SURPRISE = 4.0
# How many times the largest of the last chunks the line through them holds for.
REACH = 1.5
# How many times their reach the next chunk may have: twice the largest of the last ones, so that a wrong line is
# noticed before it does harm.
GROWTH = 4 / 3
# Relative variance of chunk sizes below which a line through them is noise, and the least time of a chunk.
LEAST_SPREAD = 0.01
LEAST_SECONDS = 1e-6


class StepCosts(Protocol):
    """Durations of steps without prompts."""

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        """Record a landed step of `tokens` tokens, `drafts` of which were drafts."""

    def known(self, rows: int) -> bool:
        """Return whether the duration of a step of `rows` rows without drafts is known."""
        ...

    def measured(self, rows: int, drafts: int) -> bool:
        """Return whether steps of the size of such a step, with drafts, were measured."""
        ...

    def ratio(self, rows: int, drafts: int) -> float:
        """Return how many times as long a step of `rows` rows takes with this number of drafts as without."""
        ...

    def seconds(self, rows: int, drafts: int) -> float:
        """Return how long a step of `rows` rows with this number of drafts takes; 0 if nothing is known."""
        ...


class LearnedCosts:
    """The median of the last steps of each size. A larger step takes no less time than a smaller one.

    A device that pads has few sizes. One with drafts that is smaller than all seen so far counts as free, so it is
    tried. On other devices every token may cost: between two sizes that were seen lies a line, sizes out of order count
    as their mean, and trials grow step by step. More drafts than any seen so far cost no more than those; but beyond
    the reach of a trial, a step takes time in proportion to its tokens, so that they do not pay.

    Now and then all steps with drafts are forgotten, because what was slow when it ran for the first time, or on a busy
    machine, would never be tried again. No row drafts before steps of about as many rows were measured without, since
    then: drafts would look free, or as good as they did on a busy machine.

    `padded` returns how many tokens a device computes in a step of these rows and drafts: all steps that it pads to one
    size cost the same.
    """

    def __init__(self) -> None:
        self.padded: Callable[[int, int], int] = unpadded
        self._plain = Durations()
        self._drafted = Durations()
        self._observed, self._forget_at = 0, FORGET_AFTER
        # Sizes of which `KEPT` steps without drafts were measured.
        self._well_known: set[int] = set()
        # Rows of which `known` has been true since the costs were last forgotten: until then it stays true.
        self._known: set[int] = set()

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        self._observed += 1
        if not drafts and self._observed % MEASURED_OF and tokens in self._well_known:
            return
        if self._observed >= self._forget_at:
            self._forget_at = self._observed + FORGET_AFTER
            self._drafted = Durations()
            self._plain.measure_anew()
            self._well_known.clear()
            self._known.clear()
        durations = self._drafted if drafts else self._plain
        if durations.add(self.padded(tokens - drafts, drafts), seconds) == KEPT and not drafts:
            self._well_known.add(tokens)

    def known(self, rows: int) -> bool:
        if rows not in self._known:
            plain = self._plain
            if not any(rows <= 2 * size and size <= 2 * rows and plain.is_new(size) for size in plain.sizes):
                return False
            self._known.add(rows)
        return True

    def measured(self, rows: int, drafts: int) -> bool:
        return _size_class(self.padded(rows, drafts)) in self._drafted.sizes

    def ratio(self, rows: int, drafts: int) -> float:
        fewest = _size_class(self.padded(rows, 0))
        base = self._plain.about(fewest) or self._plain.below(fewest)
        if base is None:
            return 1.0
        size = _size_class(self.padded(rows, drafts))
        if self.padded is unpadded:
            took = self._drafted.estimate(size, fewest, base, rows + max(TRIED, rows // TRIED_OF))
        else:
            took = self._drafted.about(size) or base
        return max(1.0, took / base)

    def seconds(self, rows: int, drafts: int) -> float:
        base = self._plain.about(_size_class(self.padded(rows, 0))) if rows else None
        return 0.0 if base is None else base * self.ratio(rows, drafts)


class Durations:
    """The last steps of each size, and what is known of every size: as tables, because each choice of drafts reads them
    many times. Sizes are those of `_size_class`."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        # Sizes of which enough is known, in order; the most that is known of each and of smaller ones, and the least of
        # each and of larger ones that were measured lately.
        self.sizes: list[int] = []
        self._most: list[float] = []
        self._least: list[float] = []
        # By the place of a size: durations of it and of larger ones, none of which falls. Made when they are read.
        self._growing: dict[int, list[float]] = {}

    def add(self, tokens: int, seconds: float) -> int:
        """Record a step. Return how many of its size are kept."""
        size = _size_class(tokens)
        last = self._last.get(size)
        if last is None:
            last = self._last[size] = deque(maxlen=KEPT)
        last.append(seconds)
        # The lower median: the first step of a size may be recorded, and slow. The fastest would flatter steps with
        # drafts, whose durations vary more.
        typical = sorted(last)[(len(last) - 1) // 2]
        if len(last) < NEEDED or (len(last) > NEEDED and self._typical.get(size) == typical):
            return len(last)
        self._typical[size] = typical
        self._tabulate()
        return len(last)

    def _tabulate(self) -> None:
        self.sizes = sorted(self._typical)
        self._most = list(accumulate((self._typical[size] for size in self.sizes), max))
        new = (self._typical[size] if self.is_new(size) else inf for size in reversed(self.sizes))
        self._least = list(accumulate(new, min))[::-1]
        self._growing.clear()

    def at(self, size: int) -> float | None:
        """Return the most that is known of steps of this size and smaller ones."""
        place = bisect_right(self.sizes, size)
        return self._most[place - 1] if place else None

    def about(self, size: int) -> float | None:
        """Return what was measured lately of steps of this size. If nothing was, return the most that is known of it
        and of smaller ones, unless a larger one was faster lately: a small step that was slow long ago says little."""
        if self.is_new(size):
            return self._typical[size]
        place = bisect_left(self.sizes, size)
        known = self.at(size)
        return known if known is None or place == len(self.sizes) else min(known, self._least[place])

    def measure_anew(self) -> None:
        """Replace what is known of each size as soon as it is measured again."""
        self._last.clear()
        self._tabulate()

    def is_new(self, size: int) -> bool:
        return len(self._last.get(size, ())) >= NEEDED

    def below(self, size: int) -> float | None:
        """Return the least that a step smaller than all known ones may take: in proportion to the smallest of them."""
        return self._most[0] * size / self.sizes[0] if self.sizes else None

    def estimate(self, size: int, fewest: int, base: float, free: int) -> float:
        """Return how long a step of this size takes, if one of the `fewest` tokens takes `base`.

        If no larger one is known, those up to `free` take as long.
        """
        first = bisect_left(self.sizes, fewest)
        sizes, known = self.sizes[first:], self._growing_from(first)
        place = bisect_right(sizes, size)
        before, took = fewest, base
        if place:
            before, took = sizes[place - 1], max(base, known[place - 1])
        if place < len(sizes):
            after, longer = sizes[place], max(took, known[place])
            return took + (longer - took) * (size - before) / (after - before)
        reach = max(free, fewest + GROWS * (before - fewest))
        return took * max(1.0, size / reach)

    def _growing_from(self, first: int) -> list[float]:
        """Return durations of the sizes from this place on that are near to the measured ones and never fall."""
        found = self._growing.get(first)
        if found is None:
            sizes = self.sizes[first:]
            kept = [len(self._last[size]) for size in sizes]
            found = self._growing[first] = growing([self._typical[size] for size in sizes], kept)
        return found


class FreeDrafts:
    """Costs of a device where drafts cost nothing: every draft that may be accepted pays."""

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        """Learn nothing."""

    def known(self, rows: int) -> bool:
        return True

    def measured(self, rows: int, drafts: int) -> bool:
        return True

    def ratio(self, rows: int, drafts: int) -> float:
        return 1.0

    def seconds(self, rows: int, drafts: int) -> float:
        return 0.0


class ChunkCosts:
    """Time that prompt tokens add to a step: a fixed part, and a part for each token.

    A line through the last chunks, whose weight fades, so it follows prompts to deeper positions. Beyond its reach,
    time grows in proportion: a line through small chunks says little about large ones. One slow step counts for a few
    times what was expected, because it may have waited for something else.
    """

    def __init__(self) -> None:
        self._count = self._tokens = self._squares = self._seconds = self._mixed = self._reach = 0.0

    @property
    def known(self) -> bool:
        return self._count > 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a chunk of `tokens` tokens that added `seconds` to its step."""
        if self.known:
            seconds = min(seconds, MOST_SURPRISE * self.seconds(tokens))
        seconds = max(seconds, LEAST_SECONDS)
        terms = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        past = (self._count, self._tokens, self._squares, self._seconds, self._mixed)
        faded = (CHUNK_MEMORY * old + new for old, new in zip(past, terms, strict=True))
        self._count, self._tokens, self._squares, self._seconds, self._mixed = faded
        self._reach = max(CHUNK_MEMORY * self._reach, REACH * tokens)

    def seconds(self, tokens: int) -> float:
        """Return how much longer a step takes with a chunk of this many tokens."""
        fixed, each = self._line()
        within = min(tokens, self._reach)
        return (fixed + each * within) * tokens / within

    def tokens(self, seconds: float) -> int:
        """Return how many tokens add at most this time: no more than twice as many as the last chunks had."""
        fixed, each = self._line()
        most = fixed + each * self._reach
        found = (seconds - fixed) / each if seconds < most else self._reach * seconds / most
        return max(0, int(min(found, GROWTH * self._reach)))

    def _line(self) -> tuple[float, float]:
        """Return the fixed part and that of each token. Chunks of one size do not tell them apart: then all is per
        token, which promises no more for larger ones than they hold."""
        assert self.known, "no chunk was measured yet"
        proportional = 0.0, self._seconds / self._tokens
        spread = self._count * self._squares - self._tokens**2
        if spread <= LEAST_SPREAD * self._tokens**2:
            return proportional
        each = (self._count * self._mixed - self._tokens * self._seconds) / spread
        fixed = (self._seconds - each * self._tokens) / self._count
        return (fixed, each) if fixed >= 0 and each > 0 else proportional


def growing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the values that never fall and are nearest to these, by weighted squares: neighbours out of order become
    their weighted mean.

    >>> growing([1.0, 5.0, 2.0, 7.0], [1, 1, 2, 1])
    [1.0, 3.0, 3.0, 7.0]
    """
    groups: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        total, sum_of_weights, count = value * weight, weight, 1
        while groups and groups[-1][0] * sum_of_weights > total * groups[-1][1]:
            before = groups.pop()
            total, sum_of_weights, count = total + before[0], sum_of_weights + before[1], count + before[2]
        groups.append((total, sum_of_weights, count))
    return [total / sum_of_weights for total, sum_of_weights, count in groups for _ in range(count)]


def unpadded(rows: int, drafts: int) -> int:
    """Return the tokens of a step on a device that computes no others."""
    return rows + drafts


@cache
def _size_class(tokens: int) -> int:
    """Return a step's size, rounded up to one of sixteen between powers of two.

    >>> [_size_class(tokens) for tokens in (1, 7, 31, 33, 63, 100)]
    [1, 7, 31, 34, 64, 100]
    """
    step = max(1, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step
