"""A matrix as it is stored, and what a format must define.

`docs/formats.md` describes both, and what a new format consists of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix [outputs, inputs], or such a matrix of every expert: `tensors` mean what `format` says.

    The tensors of experts have a leading dimension.
    """

    format: Format
    tensors: tuple[Tensor, ...]
    outputs: int
    inputs: int

    @staticmethod
    def of(matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        """Return a matrix of plain numbers."""
        return Stored(DENSE, (matrix,), matrix.shape[-2], matrix.shape[-1])

    @property
    def dense(self) -> Float[Tensor, "*experts outputs inputs"] | None:
        """Return the matrix if its numbers are stored plainly."""
        return self.tensors[0] if self.format is DENSE else None

    @property
    def experts(self) -> int:
        """Return the number of matrices, of a layer of experts."""
        return len(self.tensors[0])

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors)

    def expert(self, number: int) -> Stored:
        """Return one expert's matrix, without a copy."""
        return replace(self, tensors=tuple(each[number] for each in self.tensors))

    def decode(self) -> Float[Tensor, "*experts outputs inputs"]:
        """Return the numbers in float32."""
        return self.format.decode(self)

    def to(self, device: torch.device | str) -> Stored:
        """Return a copy on a device, in memory of its own."""
        return replace(self, tensors=tuple(each.to(device, copy=True).contiguous() for each in self.tensors))


class Format(ABC):
    """How the numbers of a matrix are stored. Instances are values: equal ones store alike.

    Methods that return None refuse: the caller then takes another way, at worst a decoded matrix.
    """

    # What identities and logs name. A change of what stored bytes mean raises the number behind it.
    name: str

    @property
    def rows_in(self) -> str | None:
        """Return what rows are rounded to before they are multiplied (`rounded.py`); None: they stay as they are."""
        return None

    @abstractmethod
    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        """Return the numbers in float32. This is the definition of the format."""

    @abstractmethod
    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        """Return these outputs of a matrix, in this order. `index` may be on a device: it is never read back."""

    def reordered(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored | None:
        """Return these outputs of a matrix in this order, stored as compactly as possible. `index` is on the host."""
        return self.rows(stored, index)

    @abstractmethod
    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        """Return some adjacent outputs."""

    @abstractmethod
    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        """Return some adjacent inputs."""

    @abstractmethod
    def stacked(self, parts: Sequence[Stored]) -> Stored | None:
        """Return matrices of this format and of the same inputs as one, their outputs one after another."""

    @abstractmethod
    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        """Return matrices of this format and of the same outputs as one, their inputs one after another."""

    @abstractmethod
    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored | None:
        """Return the matrix times a factor, or times one for each output."""

    def encode(self, matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        """Return numbers as this format stores them, rounded to the nearest."""
        raise NotImplementedError(f"{self.name} is only read")

    def bytes_of(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix of this size. Needed of formats that a configuration can state."""
        raise NotImplementedError(f"{self.name} is only read")


@dataclass(frozen=True, slots=True)
class Dense(Format):
    """Plain numbers in the dtype of their tensor."""

    name: str = "dense"

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        return stored.tensors[0].float()

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        return Stored.of(stored.tensors[0].index_select(-2, index))

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored:
        return Stored.of(stored.tensors[0][..., start:end, :])

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored:
        return Stored.of(stored.tensors[0][..., start:end])

    def stacked(self, parts: Sequence[Stored]) -> Stored | None:
        return Stored.of(torch.cat([part.tensors[0] for part in parts], -2))

    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        return Stored.of(torch.cat([part.tensors[0] for part in parts], -1))

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored:
        matrix = stored.tensors[0]
        factors = torch.as_tensor(factor, dtype=torch.float32, device=matrix.device)
        return Stored.of((matrix.float() * factors.view(-1, 1)).to(matrix.dtype))

    def encode(self, matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        return Stored.of(matrix)


DENSE = Dense()


def as_dense(stored: Stored, dtype: torch.dtype) -> Stored:
    """Return a matrix of any format as plain numbers."""
    return Stored.of(stored.decode().to(dtype))


@dataclass(frozen=True, slots=True)
class Layout(Format):
    """Memory as one backend reads it: only that backend, which made it, knows what it means."""

    name: str

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        raise NotImplementedError(self.name)

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        raise NotImplementedError(self.name)

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        return None

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        return None

    def stacked(self, parts: Sequence[Stored]) -> Stored | None:
        return None

    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        return None

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored | None:
        return None
