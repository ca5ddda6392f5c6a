"""How a model is cut over ranks: which part of each dimension a rank holds. No torch.

A rank holds some heads, channels, vocabulary entries and columns of every layer, and nothing else of the model. A
family is built for one rank: `weights.build` sets the rank as it sets torch's dtype and device, and each kind of layer
asks here which part of its sizes is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from weft.base.errors import ModelError


@dataclass(frozen=True, slots=True)
class RankCut:
    """The part of a dimension that a rank holds: ranges of the whole, in order."""

    size: int  # of the whole
    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def whole(size: int | RankCut) -> RankCut:
        """Return a dimension that every rank holds completely."""
        return size if isinstance(size, RankCut) else RankCut(size, ((0, size),))

    @property
    def kept(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.kept == self.size

    def times(self, width: int) -> RankCut:
        """Return the same part of a dimension in which every entry is `width` adjacent ones.

        >>> RankCut(4, ((2, 4),)).times(8)
        RankCut(size=32, ranges=((16, 32),))
        """
        return RankCut(self.size * width, tuple((start * width, end * width) for start, end in self.ranges))


def side_by_side(*sections: RankCut) -> RankCut:
    """Return the cut of sections that follow one another, adjacent ranges merged.

    >>> side_by_side(RankCut(4, ((2, 4),)), RankCut.whole(3), RankCut(4, ((2, 4),)))
    RankCut(size=11, ranges=((2, 7), (9, 11)))
    """
    ranges: list[tuple[int, int]] = []
    offset = 0
    for section in sections:
        for start, end in section.ranges:
            if ranges and ranges[-1][1] == offset + start:
                ranges[-1] = (ranges[-1][0], offset + end)
            else:
                ranges.append((offset + start, offset + end))
        offset += section.size
    return RankCut(offset, tuple(ranges))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group. Every rank has parts of the same sizes, so plans fit all of them."""

    rank: int = 0
    ranks: int = 1
    # Spread whole experts over the ranks, instead of the channels of each.
    whole_experts: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def cut(self, count: int, what: str) -> RankCut:
        """Return this rank's equal part of `count` things, or raise with their name.

        >>> Shard(1, 2).cut(8, "heads")
        RankCut(size=8, ranges=((4, 8),))
        """
        if count % self.ranks:
            raise ModelError(
                f"tensor_parallel is {self.ranks} but must divide the model's {count} {what}; pass a divisor of {count}"
            )
        share = count // self.ranks
        return RankCut(count, ((self.rank * share, (self.rank + 1) * share),))

    def cut_or_repeat(self, count: int, what: str) -> RankCut:
        """Return this rank's part of things that several ranks may hold, if there are fewer than ranks.

        >>> Shard(3, 4).cut_or_repeat(2, "groups")
        RankCut(size=2, ranges=((1, 2),))
        """
        if count % self.ranks == 0:
            return self.cut(count, what)
        if self.ranks % count:
            raise ModelError(
                f"tensor_parallel is {self.ranks} but must divide the model's {count} {what}, or be a multiple of them"
            )
        own = self.rank * count // self.ranks
        return RankCut(count, ((own, own + 1),))

    def cut_experts(self, count: int, channels: int) -> tuple[RankCut, RankCut]:
        """Return this rank's part of a layer's experts, and its part of each one's channels.

        >>> Shard(1, 2).cut_experts(8, 64)
        (RankCut(size=8, ranges=((0, 8),)), RankCut(size=64, ranges=((32, 64),)))
        >>> Shard(1, 2, whole_experts=True).cut_experts(8, 64)
        (RankCut(size=8, ranges=((4, 8),)), RankCut(size=64, ranges=((0, 64),)))
        """
        if self.whole_experts:
            return self.cut(count, "experts"), RankCut.whole(channels)
        return RankCut.whole(count), self.cut(channels, "channels of an expert")

    def padded(self, count: int) -> tuple[RankCut, int]:
        """Return this rank's part of `count` things that need not be even, and the size of every rank's part.

        The last parts may have fewer things, or none.

        >>> Shard(1, 2).padded(7)
        (RankCut(size=7, ranges=((4, 7),)), 4)
        """
        share = -(-count // self.ranks)
        start = min(count, self.rank * share)
        return RankCut(count, ((start, min(count, start + share)),)), share


ALONE = Shard()
_building: ContextVar[Shard] = ContextVar("weft_shard", default=ALONE)


def current_shard() -> Shard:
    """Return the rank for which a model is being built."""
    return _building.get()


@contextmanager
def building_for(shard: Shard) -> Iterator[None]:
    """Build layers for this rank inside the context."""
    token = _building.set(shard)
    try:
        yield
    finally:
        _building.reset(token)
