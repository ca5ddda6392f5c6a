"""Drafts where a grammar leaves a choice: what followed the last two tokens, or the last one, when they came before.

Between the tokens that a grammar forces, few choices are left: spaces, line breaks, separators, one of some values. An
answer makes them as it made them before, and as earlier answers of the same grammar did. So an agreement of one or two
tokens is enough for a draft, where free text needs several.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from weft.base.grammar import Grammar
from weft.drafting.policy.spelling import Draft

# Tokens of an answer that are noted at once: the last ones, if more have not been noted yet.
MOST_NOTED = 1 << 11
# Entries of an answer, of finished answers of one salt and grammar, and of all of those together.
MOST_OF_ONE = 1 << 13
MOST_SHARED = 1 << 16
# What followed a key the last time, and the time before.
Followers = tuple[int, int | None]
# Sources of drafts by what agrees, the best first. With "again", the last two times were the same.
_ORDER = (("own pair", True), ("other pair", True), ("own token", False), ("other token", False))


class Habits:
    """What followed each pair of tokens and each single token of one answer: two entries for each token at most.

    The first ones stay: a long answer is mostly free text, whose pairs do not come again.
    """

    def __init__(self) -> None:
        self.followers: dict[int, Followers] = {}
        self._noted = 0

    def extend(self, answer: Sequence[int]) -> None:
        """Add the tokens by which the answer, given in full, has grown: the last `MOST_NOTED` of them."""
        for place in range(max(1, self._noted, len(answer) - MOST_NOTED), len(answer)):
            token, last = answer[place], answer[place - 1]
            self._note(last, token)
            if place > 1:
                self._note(pair_of(answer[place - 2], last), token)
        self._noted = len(answer)

    def _note(self, key: int, token: int) -> None:
        before = self.followers.get(key)
        if before is not None or len(self.followers) < MOST_OF_ONE:
            self.followers[key] = token, None if before is None else before[0]

    def draft(
        self, others: dict[int, Followers] | None, recent: Sequence[int], allows: Callable[[int], bool]
    ) -> Draft | None:
        """Return what followed the last tokens before, if it may come next; `others` are habits of earlier answers."""
        single = recent[-1]
        pair = pair_of(*recent[-2:]) if len(recent) > 1 else None
        for kind, is_pair in _ORDER:
            known, key = self.followers if kind.startswith("own") else others, pair if is_pair else single
            found = None if known is None or key is None else known.get(key)
            if found is None:
                continue
            last, before = found
            if allows(last):
                return Draft(last, f"{kind} again" if last == before else kind)
            if before is not None and allows(before):
                return Draft(before, kind)
        return None


class SharedHabits:
    """Habits of finished answers by `key_of`: for later ones of the same salt and grammar only.

    Bounded, oldest out first. A key counts as an entry.
    """

    def __init__(self, most: int = MOST_SHARED, most_of_one: int = MOST_OF_ONE) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._of: OrderedDict[bytes, dict[int, Followers]] = OrderedDict()
        self.entries = 0

    def add(self, key: bytes, own: Habits) -> None:
        """Keep the habits of a finished answer. They are the last ones; those before are what others did last."""
        if not own.followers:
            return
        if key not in self._of:
            self._of[key] = {}
            self.entries += 1
        kept = self._of[key]
        self._of.move_to_end(key)
        self.entries -= len(kept)
        for tokens, (last, before) in own.followers.items():
            earlier = kept.pop(tokens, None)
            kept[tokens] = last, before if before is not None or earlier is None else earlier[0]
        for tokens in list(kept)[: max(0, len(kept) - self._most_of_one)]:
            del kept[tokens]
        self.entries += len(kept)
        while self.entries > self._most:
            self.entries -= 1 + len(self._of.popitem(last=False)[1])

    def of(self, key: bytes) -> dict[int, Followers] | None:
        return self._of.get(key)

    def clear(self) -> None:
        self._of.clear()
        self.entries = 0


def key_of(salt: bytes, grammar: Grammar) -> bytes:
    """Return a digest of a salt and a grammar: a grammar may be long, and its habits stay when it is forgotten."""
    parts = (salt, grammar.kind, grammar.text, grammar.source)
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def pair_of(first: int, second: int) -> int:
    """Return the key of two tokens, which is that of no other pair and of no single token."""
    return (first + 1) << 32 | second
