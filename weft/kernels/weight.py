"""Weights of a matmul, as layers pass them to operations."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix and its bias, in the forms that a backend reads.

    `Operations.prepare` chooses the forms after the numbers are loaded. Only the backend that prepared a weight
    knows its layout: layers ask for its sizes and multiply with it, and nothing else.
    """

    matrix: Float[Tensor, "*layout"]
    bias: Float[Tensor, " outputs"] | None = None
    # A second copy in the fastest layout for few rows; None: `matrix` serves those too.
    few: Float[Tensor, "*layout"] | None = None
    # Number of outputs of a prepared matrix; None: that of its rows, as in a checkpoint.
    size: int | None = None

    @property
    def for_few(self) -> Float[Tensor, "*layout"]:
        return self.matrix if self.few is None else self.few

    def first(self, outputs: int) -> Weight | None:
        """Return the part of the first outputs, without a copy; None if another layout is prepared."""
        if self.size is not None or self.few is not None:
            return None
        return Weight(self.matrix[:outputs], None if self.bias is None else self.bias[:outputs])

    @property
    def outputs(self) -> int:
        return self.matrix.shape[0] if self.size is None else self.size
