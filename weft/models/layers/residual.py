"""The residual stream that blocks read and add to.

What was added last is added for real when the stream is next read: through a norm, so that a GPU adds and norms in
one kernel.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from weft.models.layers.norm import RMSNorm


class Residual:
    def __init__(self, x: Float[Tensor, "tokens hidden"]) -> None:
        self.x = x
        self.pending: tuple[Tensor, float, RMSNorm | None] | None = None

    def read(self, norm: RMSNorm) -> Float[Tensor, "tokens hidden"]:
        """The norm of all that was added so far."""
        if self.pending is None:
            return norm(self.x)
        self.x, normed = norm.join(self.x, *self.pending)
        self.pending = None
        return normed

    def add(self, change: Float[Tensor, "tokens hidden"], factor: float = 1.0, norm: RMSNorm | None = None) -> None:
        """Add `change`, through its own norm if it has one, times `factor`."""
        if self.pending is not None:
            earlier, its_factor, its_norm = self.pending
            self.x = torch.add(self.x, earlier if its_norm is None else its_norm(earlier), alpha=its_factor)
        self.pending = change, factor, norm
