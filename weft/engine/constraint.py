"""What the engine needs of whatever knows grammars: which tokens may come next in one answer.

The engine asks and obeys; what a grammar means and how it is compiled is its maker's business.
"""

from __future__ import annotations

from typing import Protocol

from weft.base.grammar import Grammar
from weft.base.plan import Ints


class Constraint(Protocol):
    """One answer that must follow a grammar, at the place where it stands."""

    @property
    def mask(self) -> Ints:
        """[words] a bit per token, lowest first: set if it may come next. Stop tokens only where the answer may end."""
        ...

    @property
    def ended(self) -> bool:
        """The answer is complete and nothing may follow."""
        ...

    def take(self, token: int) -> None:
        """Go on by a token that the mask allowed. Raises `RequestError` if the grammar then has no way on."""


class Constraints(Protocol):
    def __call__(self, grammar: Grammar, stop_tokens: frozenset[int]) -> Constraint:
        """The beginning of an answer. Raises `RequestError` if the grammar is none."""
        ...
