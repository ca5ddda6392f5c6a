"""How formats are written to checkpoints for other tools, in the words of compressed-tensors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.kernels.formats.stored import Format, Stored


@dataclass(frozen=True, slots=True)
class Stating:
    """What a configuration states about matrices: the name of their layout, and facts about their numbers."""

    layout: str
    weights: dict[str, Any]


class WrittenFormat(Format):
    """A format that `weft convert` can write."""

    def for_others(self, outputs: int, inputs: int) -> Format:
        """Return the nearest format in which no group, block or word of a matrix is shorter than the others."""
        return self

    @abstractmethod
    def spelled(self, stored: Stored) -> dict[str, Tensor]:
        """Return the tensors of a matrix by compressed-tensors' names for them."""

    @abstractmethod
    def stating(self) -> Stating:
        """Return what is stated about a matrix. Matrices with the same statement are one group."""


def stated(layout: str, kind: str, bits: int, strategy: str, **more: Any) -> Stating:
    """Return a statement about codes without zeros whose scales are stored."""
    own = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    return Stating(layout, {**own, **more})


def by_channel(layout: str, kind: str, bits: int) -> Stating:
    """Return the statement that each output has one scale."""
    return stated(layout, kind, bits, "channel", group_size=None)
