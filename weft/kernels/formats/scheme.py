"""What a configuration states about a matrix, and how a format's tensors are spelled in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.kernels.formats.stored import Stored


@dataclass(frozen=True, slots=True)
class Statement:
    """One entry of a quantisation configuration, in the words of its tool."""

    method: str  # quant_method
    algorithm: str | None = None  # ModelOpt's quant_algo
    format: str | None = None  # compressed-tensors' name of a packed form
    kind: str | None = None  # float or int
    bits: int | None = None
    strategy: str | None = None  # which numbers share a scale
    block: tuple[int, int] | None = None
    group: int | None = None
    symmetric: bool = True  # no zeros

    def __str__(self) -> str:
        words = [self.method, self.algorithm, self.format, self.kind, self.bits and f"{self.bits} bits", self.strategy]
        return " ".join(str(word) for word in words if word)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are quantised, as a format understood it: the kind of its spellings, sizes, and how it is packed."""

    kind: str
    block: tuple[int, int] | None = None
    # Of integers. Without a group, all inputs of an output are one.
    bits: int | None = None
    group: int | None = None
    packing: str | None = None
    symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names, dtypes and shapes of the tensors that a checkpoint keeps for one matrix.

    A name is appended to that of the matrix (`...q_proj.weight`, `...experts.gate_up_proj`); with a leading dot it
    replaces `.weight`.
    """

    kind: str
    names: tuple[str, ...]
    dtypes: tuple[tuple[str, ...], ...]  # as safetensors names them
    # The sizes of the matrix by the shapes of its tensors, or a complaint.
    sizes: Callable[[Sequence[tuple[int, ...]], Scheme], tuple[int, ...] | str]
    read: Callable[[Sequence[Tensor], Scheme], Stored]
    # A configuration must state it too. Otherwise the dtypes of the tensors are statement enough.
    is_stated: bool = True

    def names_of(self, matrix: str) -> tuple[str, ...]:
        """
        >>> Spelling("fp8", ("", "_scale", ".act"), (), len, len).names_of("a.q_proj.weight")
        ('a.q_proj.weight', 'a.q_proj.weight_scale', 'a.q_proj.act')
        """
        parent = matrix.removesuffix(".weight")
        return tuple(f"{parent}{name}" if name.startswith(".") else f"{matrix}{name}" for name in self.names)
