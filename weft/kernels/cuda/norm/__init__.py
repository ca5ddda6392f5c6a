"""A residual stream whose norms may be fused into the matmuls that read them.

With one row, computing the norm inside the next small matmul is faster than a separate kernel, which leaves the memory
bus idle while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.norm.norms import add, gated_rms_norm, join, rms_norm
from weft.kernels.stream import Change, Norm, Normed, Residual

__all__ = ["LazyNorm", "LazyResidual", "gated_rms_norm", "residual", "rms_norm", "rows_of"]


@dataclass(slots=True)
class LazyNorm:
    """The norm of a one-row stream and of a change to it, not computed yet.

    The first matmul that reads it may compute it, and then stores it for later readers.
    """

    x: Float[Tensor, "1 size"]
    change: Change | None
    weight: Float[Tensor, " size"]
    eps: float
    # Once computed: x plus the change, and the norm of that.
    total: Float[Tensor, "1 size"] | None = None
    result: Float[Tensor, "1 size"] | None = None

    def summed(self) -> Float[Tensor, "1 size"]:
        """Return x plus the change."""
        if self.total is None:
            self.computed()
        assert self.total is not None
        return self.total

    def computed(self) -> Float[Tensor, "1 size"]:
        """Return the norm, computed by its own kernel if no matmul has stored it."""
        if self.result is None:
            changes = [] if self.change is None else [self.change]
            self.total, self.result = join(self.x, changes, self.weight, self.eps)
        return self.result

    def leave(self) -> tuple[Tensor, Tensor]:
        """Return the buffers where a kernel that computes them stores the sum and its norm."""
        assert self.result is None
        self.total, self.result = torch.empty_like(self.x), torch.empty_like(self.x)
        return self.total, self.result


def rows_of(x: Normed) -> Float[Tensor, "n size"]:
    return x if isinstance(x, Tensor) else x.computed()


def residual(x: Float[Tensor, "tokens hidden"]) -> Residual:
    return LazyResidual(x)


def can_wait(x: Float[Tensor, "n size"], changes: list[Change]) -> bool:
    """Return whether a norm may be left to its readers: their kernels add at most one plain change."""
    plain = all(change.weight is None and change.value.ndim == 2 for change in changes)
    return len(x) == 1 and len(changes) <= 1 and plain


class LazyResidual(Residual):
    """A stream that offers a `LazyNorm` where it can."""

    def __init__(self, x: Float[Tensor, "tokens hidden"]) -> None:
        super().__init__(x, join, add)
        # The norm that was read last: it may not be computed yet, nor the sum.
        self.lazy: LazyNorm | None = None

    def read(self, norm: Norm) -> Normed:
        self._settle()
        if not can_wait(self.x, self.pending):
            return super().finish(norm)
        self.lazy = LazyNorm(self.x, self.pending[0] if self.pending else None, norm.weight, norm.eps)
        self.pending = []
        return self.lazy

    def total(self) -> Float[Tensor, "tokens hidden"]:
        self._settle()
        return super().total()

    def finish(self, norm: Norm) -> Float[Tensor, "tokens hidden"]:
        self._settle()
        return super().finish(norm)

    def _settle(self) -> None:
        if self.lazy is not None:
            self.x, self.lazy = self.lazy.summed(), None
