"""The residual stream: blocks read it through norms and add to it.

Nothing is added or normed before it is needed: what blocks add waits until the stream is next read, where one kernel
adds and norms. A backend may wait longer and leave the norm to the first matmul that reads it. Models therefore see two
opaque values: `Normed`, which operations take as it is, and `Addend`, which only the stream takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Norm(Protocol):
    """The weights of a norm, as layers hold them."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be added to a residual stream, times `factor`; with weights, after a norm of its own.

    A value in float32 parts is the sum of them, as `Operations.linear_into_stream` may leave it.
    """

    value: Float[Tensor, "*parts n size"]
    factor: float = 1.0
    weight: Float[Tensor, " size"] | None = None
    eps: float = 0.0


@runtime_checkable
class UnreadNorm(Protocol):
    """A norm that is still to be computed."""

    def computed(self) -> Float[Tensor, "n size"]: ...


# What a block reads: rows, or a norm that is still to be computed. `Operations.rows_of` makes rows of it.
Normed: TypeAlias = Tensor | UnreadNorm
# What a block adds, [*parts, rows, size]: the last projection may leave a sum in parts, which the stream adds up.
Addend: TypeAlias = Tensor


@runtime_checkable
class Joining(Protocol):
    """Add changes to a stream and norm the sum; both are returned."""

    def __call__(
        self, x: Float[Tensor, "n size"], changes: list[Change], weight: Float[Tensor, " size"], eps: float
    ) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]: ...


class Residual:
    """The sum of the embedding and of everything that blocks have added."""

    def __init__(
        self, x: Float[Tensor, "tokens hidden"], join: Joining, add: Callable[[Tensor, Change], Tensor]
    ) -> None:
        self.x = x
        self.pending: list[Change] = []
        self._join = join
        self._add = add

    def read(self, norm: Norm) -> Normed:
        """Return the norm of the stream for a block."""
        return self.finish(norm)

    def total(self) -> Float[Tensor, "tokens hidden"]:
        """Return the stream itself, for blocks that norm what they add instead of what they read."""
        for change in self.pending:
            self.x = self._add(self.x, change)
        self.pending = []
        return self.x

    def finish(self, norm: Norm) -> Float[Tensor, "tokens hidden"]:
        """Return the norm of the stream behind the last block."""
        self.x, normed = self._join(self.x, self.pending, norm.weight, norm.eps)
        self.pending = []
        return normed

    def add(self, addend: Addend, factor: float = 1.0, norm: Norm | None = None) -> None:
        """Add `factor` times the addend, or times its norm if it has a norm of its own."""
        own = Change(addend, factor) if norm is None else Change(addend, factor, norm.weight, norm.eps)
        self.pending.append(own)
