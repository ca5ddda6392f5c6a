"""What answers of a grammar teach, and whom."""

from __future__ import annotations

import numpy as np

from weft.base.grammar import Grammar
from weft.drafting.policy.choosing import Drafting

GRAMMAR = Grammar("regex", "[a-h]*")


class AnyToken:
    """A grammar that allows some tokens everywhere, and forces none."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = set(allowed)

    def forced(self) -> int | None:
        return None

    def allows(self, token: int) -> bool:
        return token in self.allowed

    def take(self, token: int) -> bool:
        return True


def taught(salt: bytes, grammar: Grammar, shares: bool = True) -> Drafting:
    """Return a drafting that has seen the answer 1 2 3 1 2 3 of this salt and grammar."""
    drafting = Drafting(4, shares=shares)
    drafts = drafting.begin(np.array([9], np.int32), salt, None, None, grammar)
    drafting.ended(salt, np.array([9, 1, 2, 3, 1, 2, 3], np.int32), drafts)
    return drafting


def guesses(drafting: Drafting, salt: bytes, grammar: Grammar) -> tuple[int, ...]:
    """Return what is drafted after 1 2 in a new answer."""
    drafts = drafting.begin(np.array([8], np.int32), salt, None, None, grammar)
    assert drafts is not None
    found = drafts.spell(AnyToken(1, 2, 3), [1, 2], 4, 4, drafting.shared, drafting.habits)
    return () if found is None else found.tokens


def check_habits_of_another_salt_or_grammar_are_never_guesses() -> None:
    drafting = taught(b"one", GRAMMAR)
    assert guesses(drafting, b"one", GRAMMAR)[:2] == (3, 1)
    assert guesses(drafting, b"one", Grammar("regex", "[a-h]+")) == ()
    assert guesses(drafting, b"other", GRAMMAR) == ()
    assert guesses(drafting, b"", GRAMMAR) == ()
