"""Which way experts are computed on a GPU for so many tokens, and in which blocks: figures of an H200.

`python -m benchmarks.kernel_moe` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.kernels.cuda.vectors import LOADS, Vectors

# Every pair reads its expert's weights for itself while there are at most so many pairs for every expert there is.
FEW_PAIRS = 0.3
# With more tokens than this, an expert's pairs are cut into tiles that are computed side by side.
WHOLE_TOKENS = 256
# And with more than this, torch's grouped product is faster, where it can be had.
TILED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of a grouped product: so many pairs and outputs at once, inputs at a time."""

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    weights_first: bool  # which operand of the product the weights are: the first needs 64 outputs to be fast


# By the number of pairs at once.
TILES = {
    16: (Tiles(16, 32, 256, 4, 3, False), Tiles(16, 64, 64, 4, 6, True)),
    32: (Tiles(32, 64, 128, 4, 4, True), Tiles(32, 128, 64, 4, 4, True)),
    64: (Tiles(64, 64, 64, 4, 6, True), Tiles(64, 128, 64, 4, 4, True)),
    128: (Tiles(128, 128, 64, 8, 3, True), Tiles(128, 128, 64, 8, 4, True)),
}


def vectors(hidden: int, inner: int, k: int) -> tuple[Vectors, Vectors]:
    """Of the first product and of the second, whose programs read a row of every choice at once.

    >>> vectors(2048, 1792, 4), vectors(2880, 2880, 4)
    ((Vectors(rows=1, warps=4), Vectors(rows=2, warps=8)), (Vectors(rows=2, warps=4), Vectors(rows=1, warps=4)))
    >>> vectors(4096, 768, 10), vectors(2048, 512, 8)
    ((Vectors(rows=2, warps=8), Vectors(rows=2, warps=4)), (Vectors(rows=1, warps=4), Vectors(rows=2, warps=2)))
    """
    first = Vectors(1, 4 if hidden <= 2048 or hidden % 2048 else 8)
    # Gate and up are read at once.
    if hidden > 2048 and 4 * first.pieces(hidden) <= LOADS:
        first = replace(first, rows=2)
    # A piece for a row, or pieces that are not much wider than what is left.
    warps = next((warps for warps in (1, 2, 4, 8) if inner <= Vectors(1, warps).columns), 4)
    second = Vectors(1, warps)
    return first, second if 2 * k * second.pieces(inner) > LOADS else replace(second, rows=2)


def tiles(dtype: torch.dtype, tokens: int, k: int, experts: int) -> tuple[Tiles, Tiles]:
    """Most experts have all their pairs in one tile."""
    mean = tokens * k / experts
    pairs = next((size for size in TILES if size >= min(tokens, 1.5 * mean)), 128)
    if dtype == torch.float32:
        # Twice the shared memory, and no matrix unit to feed.
        return (Tiles(min(pairs, 32), 32, 32, 4, 2, False),) * 2
    return TILES[pairs]
