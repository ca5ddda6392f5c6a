"""The weights of a matmul, as layers hand them to operations."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix and its bias, in the forms that a backend reads.

    `Operations.prepare` chooses the forms once the numbers are loaded. Only the backend that prepared a weight knows
    its layout, so layers ask for its sizes and multiply with it, and look no further.
    """

    matrix: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"] | None = None
    # The same numbers once more, as a few rows read them fastest; None: as `matrix` has them.
    few: Float[Tensor, "outputs inputs"] | None = None

    @property
    def for_few(self) -> Float[Tensor, "outputs inputs"]:
        return self.matrix if self.few is None else self.few
