"""The engine's interface to grammars: which tokens may come next in one answer.

The engine only applies the masks; the implementation defines and compiles grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.base.grammar import Grammar
from weft.base.plan import Ints


class Constraint(Protocol):
    """One answer that follows a grammar, at its current position."""

    @property
    def mask(self) -> Ints:
        """[words] one bit per token, lowest first: set if it may come next. Stop tokens only where it may end."""
        ...

    def forced(self) -> list[int]:
        """Return tokens that spell what must come next; none if there is a choice. The position stays."""
        ...

    def masks_along(self, tokens: Sequence[int]) -> list[Ints]:
        """Return the masks after each of further tokens, as far as the answer may go on. The position stays.

        Asked again at the same position for the first of the tokens, it returns the first of the same masks.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        ...

    def take(self, token: int) -> None:
        """Advance by a token that the mask allowed. Raises `RequestError` if the grammar then has no continuation."""


class Constraints(Protocol):
    def __call__(self, grammar: Grammar, stop_tokens: frozenset[int]) -> Constraint:
        """Return the start of an answer. Raises `RequestError` if the grammar is invalid."""
        ...
