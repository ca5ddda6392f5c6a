"""Operations of one rank of a tensor-parallel group: those of its device, and sums over ranks where blocks meet.

Values are of three kinds. What a block reads from the residual stream is the same on every rank. Between its
projections, each rank has its own heads or channels. What a block adds to the stream is a summand, and the stream adds
up those of all ranks. So no layer knows about other ranks, except norms over heads of several.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.choosing import Table
from weft.kernels.formats.stored import Stored
from weft.kernels.interface import Batch, DecodeSteps, Operations
from weft.kernels.stream import Addend, Residual


@runtime_checkable
class RankGroup(Protocol):
    """All ranks that compute one model. Every rank calls the same methods in the same order.

    The results have the same bits on every rank.
    """

    rank: int
    ranks: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks. The memory of x may be reused."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape, in order."""

    def from_first(self, x: Tensor) -> Tensor:
        """Return the first rank's tensor, in the memory of x."""


def over_ranks(operations: Operations, group: RankGroup) -> Operations:
    """Return operations of one rank that compute one model with those of the others."""

    def residual(x: Float[Tensor, "tokens hidden"]) -> Residual:
        stream = operations.residual(group.sum(x))
        stream.sum_up = partial(sum_up, dtype=x.dtype)
        return stream

    def sum_up(addend: Addend, dtype: torch.dtype) -> Addend:
        return group.sum(addend.to(dtype).contiguous())

    def look_up(tokens: Int[Tensor, " n"], table: Stored, scale: float, dtype: torch.dtype) -> Float[Tensor, "n size"]:
        """Return the vectors of this rank's tokens, and zeros for all others."""
        own = tokens - group.rank * table.outputs
        absent = (own < 0) | (own >= table.outputs)
        found = operations.look_up(own.clamp(0, table.outputs - 1), table, scale, dtype)
        return found.masked_fill(absent.unsqueeze(-1), 0.0)

    def add_ranks(x: Tensor) -> Tensor:
        return group.sum(x.contiguous())

    def gather_ranks(x: Float[Tensor, "n part"], size: int) -> Float[Tensor, "n size"]:
        return torch.cat(group.gather(x.contiguous()), -1)[..., :size]

    def record_decodes(compute: Callable[[Batch], Tensor]) -> DecodeSteps:
        """Compute every step anew: a replayed one would leave out the sums over ranks."""
        return DecodeSteps(compute)

    own = {
        "residual": residual,
        # A rank adds up its own partial sums before they travel.
        "linear_into_stream": operations.linear,
        "look_up": look_up,
        "add_ranks": add_ranks,
        "gather_ranks": gather_ranks,
        "record_decodes": record_decodes,
    }
    return cast(Operations, Table({**vars(operations), **own}))
