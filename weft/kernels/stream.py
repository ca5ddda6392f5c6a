"""The residual stream: blocks read it through norms and add to it.

Nothing is added or normed before a kernel needs it. What blocks add waits until the stream is next read, where one
kernel adds and norms. With one row on a GPU even that is left to the first matmul that reads the norm. Models see two
opaque values: `Normed`, which matmuls take as it is, and `Addend`, which only the stream takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.norm import Change, add, add_and_norm, rms_norm


@runtime_checkable
class Norm(Protocol):
    """The weights of a norm, as layers hold them."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class LazyNorm:
    """The norm of a one-row residual stream and of a change to it, on a GPU, not computed yet.

    If the matmul that reads it first is small, it computes the norm on its way and leaves it for later readers: a
    separate kernel would take longer than that and leave the memory bus idle meanwhile.
    """

    x: Float[Tensor, "1 size"]
    change: Change | None
    weight: Float[Tensor, " size"]
    eps: float
    # Once computed: x with the change, and the norm of that.
    total: Float[Tensor, "1 size"] | None = None
    result: Float[Tensor, "1 size"] | None = None

    def summed(self) -> Float[Tensor, "1 size"]:
        """Return x with the change."""
        if self.total is None:
            self.computed()
        assert self.total is not None
        return self.total

    def computed(self) -> Float[Tensor, "1 size"]:
        """Return the norm, by a kernel of its own if no matmul has left it."""
        if self.result is None:
            changes = [] if self.change is None else [self.change]
            self.total, self.result = add_and_norm(self.x, changes, self.weight, self.eps)
        return self.result

    def leave(self) -> tuple[Tensor, Tensor]:
        """Return the places where a kernel that computes them leaves the sum and its norm."""
        assert self.result is None
        self.total, self.result = torch.empty_like(self.x), torch.empty_like(self.x)
        return self.total, self.result


# What a block reads: rows, or a norm that is still to be computed. `whole` makes rows of it.
Normed: TypeAlias = Tensor | LazyNorm
# What a block adds, [*parts, rows, size]: the last projection may leave a sum in parts, which the stream adds up.
Addend: TypeAlias = Tensor


def whole(x: Normed) -> Float[Tensor, "n size"]:
    """Return the rows of a norm for operations other than matmuls."""
    return x.computed() if isinstance(x, LazyNorm) else x


def can_wait(x: Float[Tensor, "n size"], changes: list[Change]) -> bool:
    """Return whether a norm may be left to its readers: their kernels add one plain change at most."""
    plain = all(change.weight is None and change.value.ndim == 2 for change in changes)
    return x.is_cuda and len(x) == 1 and len(changes) <= 1 and plain


class Residual:
    """The sum of the embedding and of everything that blocks have added."""

    def __init__(self, x: Float[Tensor, "tokens hidden"]) -> None:
        self.x = x
        self.pending: list[Change] = []
        # The norm that was read last: it may still have to be computed, and the sum with it.
        self.lazy: LazyNorm | None = None

    def read(self, norm: Norm) -> Normed:
        """Return the norm of the stream for the matmuls of a block."""
        self._settle()
        if not can_wait(self.x, self.pending):
            return self._normed(norm)
        self.lazy = LazyNorm(self.x, self.pending[0] if self.pending else None, norm.weight, norm.eps)
        self.pending = []
        return self.lazy

    def total(self) -> Float[Tensor, "tokens hidden"]:
        """Return the stream itself, for blocks that norm what they add instead of what they read."""
        self._settle()
        for change in self.pending:
            self.x = add(self.x, change)
        self.pending = []
        return self.x

    def finish(self, norm: Norm) -> Float[Tensor, "tokens hidden"]:
        """Return the norm of the stream behind the last block."""
        self._settle()
        return self._normed(norm)

    def add(self, addend: Addend, factor: float = 1.0, norm: Norm | None = None) -> None:
        """Add `factor` times the addend, or times its norm if it has a norm of its own."""
        own = Change(addend, factor) if norm is None else Change(addend, factor, norm.weight, norm.eps)
        self.pending.append(own)

    def _normed(self, norm: Norm) -> Float[Tensor, "tokens hidden"]:
        if not self.pending:
            return rms_norm(self.x, norm.weight, norm.eps)
        self.x, normed = add_and_norm(self.x, self.pending, norm.weight, norm.eps)
        self.pending = []
        return normed

    def _settle(self) -> None:
        if self.lazy is not None:
            self.x, self.lazy = self.lazy.summed(), None
