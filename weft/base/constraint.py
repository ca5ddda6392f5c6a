"""The engine's interface to grammars: which tokens may come next in one answer.

The engine only applies the masks; the implementation defines and compiles grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.base.grammar import Grammar
from weft.base.plan import Ints


class LookAhead(Protocol):
    """A position ahead of an answer that follows a grammar: at first the answer's own."""

    def forced(self) -> int | None:
        """Return the only token that may come next; None if there is a choice, or if the answer ends here."""
        ...

    def allows(self, token: int) -> bool:
        """Return whether a token may come next and does not end the answer."""
        ...

    def take(self, token: int) -> bool:
        """Advance by an allowed token, unless finding what may follow it takes too long. Return whether it did."""
        ...


class Constraint(Protocol):
    """One answer that follows a grammar, at its current position."""

    @property
    def mask(self) -> Ints:
        """[words] one bit per token, lowest first: set if it may come next. Stop tokens only where it may end."""
        ...

    def look_ahead(self) -> LookAhead:
        """Return a copy of the position, to look ahead from. Masks of the tokens that it takes are kept."""
        ...

    def masks_along(self, tokens: Sequence[int]) -> list[Ints]:
        """Return the masks after each of further tokens, as far as the answer may go on. The position stays.

        Masks that were found at this position before, here or by a look ahead, are not looked for again.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        ...

    @property
    def slow(self) -> bool:
        """Whether masks of this grammar take so long that the engine's thread should not look for them."""
        ...

    @property
    def seconds(self) -> float:
        """Processor time that everything since the start of the answer took, looks ahead included."""
        ...

    def foresees(self, token: int) -> bool:
        """Return whether a look ahead has already found what may follow this token."""
        ...

    def take(self, token: int) -> None:
        """Advance by a token that the mask allowed. Raises `RequestError` if the grammar then has no continuation."""


class Constraints(Protocol):
    def __call__(self, grammar: Grammar, stop_tokens: frozenset[int], salt: bytes) -> Constraint:
        """Return the start of an answer. Raises `RequestError` if the grammar is invalid.

        Nothing that was compiled for another salt is used, because that would take less time.
        """
        ...
