"""The residual stream that blocks read and add to.

What is added is added for real when the stream is next read: through a norm, so that a GPU adds and norms in one
kernel, or as a part of the product that reads it (`norm.LazyNorm`).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.kernels.norm import Change, LazyNorm, can_wait
from weft.models.layers.norm import RMSNorm


class Residual:
    def __init__(self, x: Float[Tensor, "tokens hidden"]) -> None:
        self.x = x
        self.pending: list[Change] = []
        # The norm that was offered last: it may be that nobody has computed it, and the sum with it.
        self.offered: LazyNorm | None = None

    def read(self, norm: RMSNorm) -> Float[Tensor, "tokens hidden"]:
        """The norm of all that was added so far."""
        self._settle()
        if not self.pending:
            return norm(self.x)
        self.x, normed = norm.join(self.x, self.pending)
        self.pending = []
        return normed

    def offer(self, norm: RMSNorm) -> Float[Tensor, "tokens hidden"] | LazyNorm:
        """The same for products, which may have to compute it themselves."""
        self._settle()
        if not can_wait(self.x, self.pending):
            return self.read(norm)
        self.offered = LazyNorm(self.x, self.pending[0] if self.pending else None, norm.weight, norm.eps)
        self.pending = []
        return self.offered

    def _settle(self) -> None:
        if self.offered is not None:
            self.x, self.offered = self.offered.summed(), None

    def add(
        self, change: Float[Tensor, "*parts tokens hidden"], factor: float = 1.0, norm: RMSNorm | None = None
    ) -> None:
        """Add `change`, or the sum of its parts, through its own norm if it has one, times `factor`."""
        own = Change(change, factor) if norm is None else Change(change, factor, norm.weight, norm.eps)
        self.pending.append(own)
