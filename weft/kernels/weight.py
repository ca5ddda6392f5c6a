"""Weights of a matmul, as layers pass them to operations."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from weft.kernels.formats.stored import Stored


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix and its bias. Its parts hold adjacent outputs, each in a format of its own.

    `Operations.prepare` may choose other formats after the numbers are loaded. Only the backend that prepared a weight
    knows its formats: layers ask for its sizes and multiply with it, and nothing else.
    """

    parts: tuple[Stored, ...]
    bias: Float[Tensor, " outputs"] | None = None
    # The matrix, if it is one part of plain numbers.
    matrix: Float[Tensor, "outputs inputs"] | None = field(init=False)
    outputs: int = field(init=False)
    inputs: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", self.parts[0].dense if len(self.parts) == 1 else None)
        object.__setattr__(self, "outputs", sum(part.outputs for part in self.parts))
        object.__setattr__(self, "inputs", self.parts[0].inputs)

    @staticmethod
    def of(matrix: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None = None) -> Weight:
        """Return a weight of plain numbers."""
        return Weight((Stored.of(matrix),), bias)

    def first(self, outputs: int) -> Weight | None:
        """Return the part of the first outputs, without a copy; None if its format does not allow that."""
        part = self.parts[0]
        cut = part.format.cut_rows(part, 0, outputs) if outputs <= part.outputs else None
        return None if cut is None else Weight((cut,), None if self.bias is None else self.bias[:outputs])
