"""One answer that follows a grammar: which tokens may come next, and looking ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from weft.base.errors import InvalidField

# Processor time that looking ahead of an answer may take in a step. Masks of an ambiguous grammar take longer and
# longer, and all other answers wait for them.
LOOK_AHEAD_SECONDS = 0.01
# Processor time for the masks of an answer: at first, and more with each token. Those of `a: a a | "x"` take time that
# grows with the square of the answer's length, and all other answers wait for them. Schemas take 0.1 ms on average.
ANSWER_SECONDS = 1.0
TOKEN_SECONDS = 0.005
# Masks that are found together, by several threads. Who took how long is not known then, so that if all of them took
# longer than one answer may take for a token, each is timed alone at its next token, and so is one that was slow alone.
MOST_TOGETHER = 128
SLOW_SECONDS = 0.001


class _Look(NamedTuple):
    """What may come after a token of a look ahead, and the processor time that it took to find."""

    mask: NDArray[np.int32]
    ended: bool
    seconds: float


class Guide:
    """One answer that follows a grammar: `mask` has one bit per token, set if it may come next.

    Stop tokens are allowed only where the answer may end, whatever their text. `ended`: only stop tokens may follow.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_tokens: frozenset[int], field: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field
        self._stops = mask_of([token for token in stop_tokens if token < vocab_size], vocab_size)
        self._not_stops = ~self._stops
        if vocab_size % 32:
            self._not_stops[-1] &= np.int32((1 << vocab_size % 32) - 1)
        self.ended = False
        # The last look ahead: tokens, and what may come after each of them.
        self._ahead: tuple[list[int], list[_Look]] = ([], [])
        # A token that the matcher has taken, and what may come after it: found with that of other answers.
        self._found: tuple[int, _Look] | None = None
        self._look_seconds = 0.0
        self._seconds_left = ANSWER_SECONDS
        self.mask = self._look()

    def take(self, token: int) -> None:
        """Advance by a token. Raises `RequestError` at a dead end."""
        began = thread_time()
        tokens, looks = self._ahead
        self._ahead = ([], [])
        if _has(self._stops, token):
            self.ended = True
            return
        if self._found is not None:
            known, look = self._found
            assert known == token
            self._found = None
            self.mask = self._checked(look.mask)
            self._look_seconds = look.seconds
        elif not self._matcher.consume_token(token):
            raise InvalidField(self._field, f"has failed on the answer: {first_words(self._matcher.get_error())}")
        elif looks and tokens[0] == token:
            # A draft that was accepted: what may come next was found when it was proposed.
            self._ahead = tokens[1:], looks[1:]
            self.mask, self.ended, self._look_seconds = looks[0]
        else:
            self.mask = self._look()
            self._look_seconds = thread_time() - began
        self._seconds_left += TOKEN_SECONDS - self._look_seconds
        if self._seconds_left < 0 and not self.ended:
            raise InvalidField(self._field, "is too ambiguous: finding the next tokens of this answer takes too long")

    def takes_part(self, token: int) -> bool:
        """Take a token in the matcher, and return whether what may follow it can be found with that of others."""
        if self._look_seconds >= SLOW_SECONDS or self._ahead[0] or _has(self._stops, token):
            return False
        # The error of a dead end is raised by `take`.
        return self._matcher.consume_token(token)

    def look_ahead(self) -> Ahead:
        """Return a position that looks ahead of the answer, from here. What it finds is kept for `take`."""
        return Ahead(self)

    def masks_along(self, tokens: Sequence[int]) -> list[NDArray[np.int32]]:
        """Return the masks after each of further tokens, as far as the answer may go on and time allows.

        The position stays. Asked again for the same tokens or the first of them, it returns the same masks.
        """
        found, looks = self._ahead
        if not tokens or tuple(found[: len(tokens)]) != tuple(tokens):
            ahead = self.look_ahead()
            for token in tokens:
                if not ahead.allows(token) or not ahead.take(token):
                    break
            looks = self._ahead[1]
        return [look.mask for look in looks[: len(tokens)]]

    def _look(self) -> NDArray[np.int32]:
        found = np.empty(self.words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        return self._checked(found)

    @property
    def words(self) -> int:
        """Words of the library's masks: the end is a token of its own, after the model's vocabulary."""
        return self._vocab_size // 32 + 1

    def _checked(self, found: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a mask of its own for what the library has found. Raises if nothing may follow."""
        if self._matcher.is_error():
            raise InvalidField(self._field, f"has no valid continuation: {first_words(self._matcher.get_error())}")
        mask: NDArray[np.int32] = found[: len(self._stops)] & self._not_stops
        may_end = self._matcher.is_accepting()
        self.ended = not mask.any()
        if self.ended and not may_end:
            raise InvalidField(self._field, "has no continuation that this model's vocabulary can spell")
        if may_end:
            mask |= self._stops
        return mask


def look_together(answers: Sequence[tuple[Guide, int]], executor: LLExecutor) -> None:
    """Find what may follow these tokens, each the next one of its answer, by several threads.

    Afterwards `take` of each must be called with its token, unless the answer ends with it.
    """
    for first in range(0, len(answers), MOST_TOGETHER):
        began = perf_counter()
        joining = [(guide, token) for guide, token in answers[first : first + MOST_TOGETHER] if guide.takes_part(token)]
        if not joining:
            continue
        found = np.empty((len(joining), joining[0][0].words), np.int32)
        fill_next_token_bitmask_par(executor, [(guide._matcher, row) for row, (guide, _) in enumerate(joining)], found)
        seconds = perf_counter() - began
        each = SLOW_SECONDS if seconds > TOKEN_SECONDS else seconds / len(joining)
        for row, (guide, token) in enumerate(joining):
            guide._found = token, _Look(found[row], False, each)


class Ahead:
    """A position that looks ahead of an answer. All it takes is at most `LOOK_AHEAD_SECONDS` of processor time."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        # What the last look ahead found. The copy of the guide is made where more is needed.
        self._known = guide._ahead
        self._copy: Guide | None = None
        self._end = thread_time() + LOOK_AHEAD_SECONDS
        self._tokens: list[int] = []
        self._looks: list[_Look] = []
        self._at = _Look(guide.mask, guide.ended, guide._look_seconds)
        guide._ahead = self._tokens, self._looks

    def forced(self) -> int | None:
        """Return the only token that may come next; None if there is a choice, or if the answer ends here."""
        mask = self._at.mask
        if self._at.ended or np.count_nonzero(mask) != 1:
            return None
        place = int(np.flatnonzero(mask)[0])
        word = int(mask[place]) & 0xFFFFFFFF
        return None if word & (word - 1) else 32 * place + word.bit_length() - 1

    def allows(self, token: int) -> bool:
        """Return whether a token may come next and does not end the answer."""
        return not self._at.ended and not _has(self._guide._stops, token) and _has(self._at.mask, token)

    def take(self, token: int) -> bool:
        """Advance by an allowed token, unless finding what may follow it takes too long. Return whether it did."""
        look = self._look(token)
        if look is None:
            return False
        self._tokens.append(token)
        self._looks.append(look)
        self._at = look
        return True

    def _look(self, token: int) -> _Look | None:
        place = len(self._tokens)
        tokens, looks = self._known
        if self._copy is None and place < len(tokens) and tokens[place] == token:
            return looks[place]
        # The next mask takes about as long as the last one did.
        if thread_time() + self._at.seconds > self._end:
            return None
        if self._copy is None:
            # A copy: budgets that looking ahead spends, and its errors, are not the answer's.
            self._copy = copy(self._guide)
            self._copy._matcher = self._guide._matcher.deep_copy()
            self._copy._matcher.consume_tokens(self._tokens)
            self._copy._ahead = ([], [])
        try:
            self._copy.take(token)
        except InvalidField:
            return None
        return _Look(self._copy.mask, self._copy.ended, self._copy._look_seconds)


def mask_of(tokens: list[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _has(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def first_words(error: str) -> str:
    """Return the library's message, without the state that it may append or the mark that it omitted it."""
    return " ".join(error.partition("<state>")[0].replace("<non-verbose/>", "").split())[:300]
