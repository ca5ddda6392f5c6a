"""The engine's interface to grammars: which tokens may come next in one answer.

The engine only applies the masks; the implementation defines and compiles grammars.
"""

from __future__ import annotations

from typing import Protocol

from weft.base.grammar import Grammar
from weft.base.plan import Ints


class Constraint(Protocol):
    """One answer that follows a grammar, at its current position."""

    @property
    def mask(self) -> Ints:
        """[words] one bit per token, lowest first: set if it may come next. Stop tokens only where it may end."""
        ...

    def mask_after(self, tokens: tuple[int, ...]) -> Ints:
        """Return the mask after further tokens, which the masks before them allow. The position stays."""
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
