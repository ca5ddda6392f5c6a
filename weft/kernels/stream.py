"""The residual stream: blocks read it through norms and add to it.

Addition and norm are deferred: what blocks add waits until the stream is next read, where one kernel adds and norms.
A backend may defer further and leave the norm to the first matmul that reads it. Models therefore see two opaque
values: `Normed`, which operations accept, and `Addend`, which only the stream accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Norm(Protocol):
    """Weights of a norm, as layers hold them."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Change:
    """A value to add to a residual stream, times `factor`; with weights, after its own norm.

    A value in float32 parts stands for their sum, as returned by `Operations.linear_into_stream`.
    """

    value: Float[Tensor, "*parts n size"]
    factor: float = 1.0
    weight: Float[Tensor, " size"] | None = None
    eps: float = 0.0


@runtime_checkable
class Unread(Protocol):
    """A norm, or an activation, that is not computed yet."""

    def computed(self) -> Float[Tensor, "n size"]: ...


# Input of a matmul: rows, or what is not computed yet. `Operations.rows_of` converts it to rows.
Normed: TypeAlias = Tensor | Unread
# Output of a block, [*parts, rows, size]: the last projection may leave a sum in parts for the stream to add up.
Addend: TypeAlias = Tensor


@runtime_checkable
class Joining(Protocol):
    """Add changes to a stream and norm the sum; return both."""

    def __call__(
        self, x: Float[Tensor, "n size"], changes: list[Change], weight: Float[Tensor, " size"], eps: float
    ) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]: ...


class Residual:
    """Sum of the embedding and everything that blocks have added."""

    def __init__(
        self, x: Float[Tensor, "tokens hidden"], join: Joining, add: Callable[[Tensor, Change], Tensor]
    ) -> None:
        self.x = x
        self.pending: list[Change] = []
        self._join = join
        self._add = add
        # What blocks add may be one rank's summand: this returns the sum.
        self.sum_up: Callable[[Addend], Addend] | None = None

    def read(self, norm: Norm) -> Normed:
        """Return the norm of the stream for a block."""
        return self.finish(norm)

    def total(self) -> Float[Tensor, "tokens hidden"]:
        """Return the stream itself, for blocks that norm their output instead of their input."""
        for change in self.pending:
            self.x = self._add(self.x, change)
        self.pending = []
        return self.x

    def finish(self, norm: Norm) -> Float[Tensor, "tokens hidden"]:
        """Return the norm of the stream after the last block."""
        self.x, normed = self._join(self.x, self.pending, norm.weight, norm.eps)
        self.pending = []
        return normed

    def add(self, addend: Addend, factor: float = 1.0, norm: Norm | None = None) -> None:
        """Add `factor` times the addend, or times its norm if it has its own."""
        if self.sum_up is not None:
            addend = self.sum_up(addend)
        own = Change(addend, factor) if norm is None else Change(addend, factor, norm.weight, norm.eps)
        self.pending.append(own)
