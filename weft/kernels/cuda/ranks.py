"""What a model that is not cut over ranks gets from the others: there are none."""

from __future__ import annotations

from weft.kernels.plain.ranks import add_ranks, gather_ranks

__all__ = ["add_ranks", "gather_ranks"]
