"""The residual stream that blocks read and add to.

What is added is added for real when the stream is next read: through a norm, so that a GPU adds and norms in one
kernel.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.kernels.norm import Change
from weft.models.layers.norm import RMSNorm


class Residual:
    def __init__(self, x: Float[Tensor, "tokens hidden"]) -> None:
        self.x = x
        self.pending: list[Change] = []

    def read(self, norm: RMSNorm) -> Float[Tensor, "tokens hidden"]:
        """The norm of all that was added so far."""
        if not self.pending:
            return norm(self.x)
        self.x, normed = norm.join(self.x, self.pending)
        self.pending = []
        return normed

    def add(
        self, change: Float[Tensor, "*parts tokens hidden"], factor: float = 1.0, norm: RMSNorm | None = None
    ) -> None:
        """Add `change`, or the sum of its parts, through its own norm if it has one, times `factor`."""
        own = Change(change, factor) if norm is None else Change(change, factor, norm.weight, norm.eps)
        self.pending.append(own)
