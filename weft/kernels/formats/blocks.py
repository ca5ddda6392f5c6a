"""Matrices in blocks of bytes, as GGUF files store them: a row is blocks, and a block has its own scales.

A type of blocks is one value in a table (`block_types.py`). A block never crosses a row, so all that is done to outputs
is done to bytes, whatever the type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.formats.stored import Format, Stored


@dataclass(frozen=True, slots=True)
class BlockFormat(Format):
    """Blocks of one type. The only tensor is bytes [outputs, blocks of an output * bytes of a block]."""

    name: str
    numbers: int  # of a block
    bytes: int
    unpack: Callable[[UInt8[Tensor, "*some bytes"]], Float[Tensor, "*some numbers"]]
    pack: Callable[[Float[Tensor, "*some numbers"]], UInt8[Tensor, "*some bytes"]] | None = None

    def of(self, codes: UInt8[Tensor, "*experts outputs bytes"]) -> Stored:
        """Return the matrix of these bytes."""
        assert codes.dtype == torch.uint8
        assert codes.shape[-1] % self.bytes == 0
        return Stored(self, (codes,), codes.shape[-2], codes.shape[-1] // self.bytes * self.numbers)

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        found: Tensor = self.unpack(stored.tensors[0].unflatten(-1, (-1, self.bytes))).flatten(-2)
        return found

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        return self.of(stored.tensors[0].index_select(-2, index))

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored:
        return self.of(stored.tensors[0][..., start:end, :])

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        if start % self.numbers or end % self.numbers:
            return None
        first, last = (place // self.numbers * self.bytes for place in (start, end))
        return self.of(stored.tensors[0][..., first:last])

    def stacked(self, parts: Sequence[Stored]) -> Stored | None:
        return self._joined(parts, -2)

    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        return self._joined(parts, -1)

    def _joined(self, parts: Sequence[Stored], dim: int) -> Stored | None:
        if any(part.format != self for part in parts):
            return None
        return self.of(torch.cat([part.tensors[0] for part in parts], dim))

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored | None:
        return stored if not isinstance(factor, Tensor) and factor == 1.0 else None

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return outputs * inputs // self.numbers * self.bytes

    def encode(self, matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        """Return numbers in blocks of this type."""
        if self.pack is None:
            raise NotImplementedError(f"{self.name} is only read")
        return self.of(self.pack(matrix.float().unflatten(-1, (-1, self.numbers))).flatten(-2))


@dataclass(frozen=True, slots=True)
class OtherInputs(Format):
    """A matrix whose inputs are stored in another order than its layer has them.

    Blocks that hold several numbers of an output cannot be cut into smaller runs of inputs. Tensors: those of the
    stored format, then `order` [inputs]: the layer's input that each stored one is. So a backend gathers its
    activations, `x[:, order]`, and multiplies with the matrix as it is stored.
    """

    inner: Format
    name: str

    @staticmethod
    def of(stored: Stored, order: Int[Tensor, " inputs"]) -> Stored:
        """Return a matrix whose stored inputs are these of the layer."""
        format = OtherInputs(stored.format, f"{stored.format.name}, inputs in another order")
        return Stored(format, (*stored.tensors, order), stored.outputs, stored.inputs)

    @property
    def rows_in(self) -> str | None:
        return self.inner.rows_in

    def as_stored(self, stored: Stored) -> Stored:
        """Return the matrix with its inputs in the order in which they are stored."""
        return replace(stored, format=self.inner, tensors=stored.tensors[:-1])

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        # Every expert has an order of its own.
        numbers, place = self.as_stored(stored).decode(), stored.tensors[-1].argsort(-1)
        return numbers.gather(-1, place.unsqueeze(-2).expand_as(numbers))

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        return OtherInputs.of(self.inner.rows(self.as_stored(stored), index), stored.tensors[-1])

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        found = self.inner.cut_rows(self.as_stored(stored), start, end)
        return None if found is None else OtherInputs.of(found, stored.tensors[-1])

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        return stored if (start, end) == (0, stored.inputs) else None

    def stacked(self, parts: Sequence[Stored]) -> Stored | None:
        return None

    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        return None

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored | None:
        found = self.inner.scaled(self.as_stored(stored), factor)
        return None if found is None else OtherInputs.of(found, stored.tensors[-1])
