"""Which way experts are computed on a GPU for so many tokens, and in which blocks: figures of an H200.

`python -m benchmarks.kernel_moe` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Every pair reads its expert's weights for itself while there are at most so many pairs for every expert there is.
FEW_PAIRS = 0.3
# With more tokens than this, an expert's pairs are cut into tiles that are computed side by side.
WHOLE_TOKENS = 256
# And with more than this, torch's grouped product is faster, where it can be had.
TILED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Vectors:
    """Blocks of a product with a vector: so many rows and columns of the matrix."""

    rows: int
    columns: int
    warps: int
    stages: int
    choices: int = 1  # of a token, side by side


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of a grouped product: so many pairs and outputs at once, inputs at a time."""

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    weights_first: bool  # which operand of the product the weights are: the first needs 64 outputs to be fast


# For experts whose inputs are a multiple of 2048, and for others.
VECTORS = Vectors(rows=2, columns=2048, warps=4, stages=1)
ODD_VECTORS = Vectors(rows=2, columns=1024, warps=4, stages=1)
SECOND_VECTORS = Vectors(rows=4, columns=512, warps=4, stages=3)
# By the number of pairs at once.
TILES = {
    16: (Tiles(16, 32, 256, 4, 3, False), Tiles(16, 64, 64, 4, 6, True)),
    32: (Tiles(32, 64, 128, 4, 4, True), Tiles(32, 128, 64, 4, 4, True)),
    64: (Tiles(64, 64, 64, 4, 6, True), Tiles(64, 128, 64, 4, 4, True)),
    128: (Tiles(128, 128, 64, 8, 3, True), Tiles(128, 128, 64, 8, 4, True)),
}


def vectors(hidden: int, inner: int) -> tuple[Vectors, Vectors]:
    return VECTORS if hidden % VECTORS.columns == 0 else ODD_VECTORS, SECOND_VECTORS


def tiles(dtype: torch.dtype, tokens: int, k: int, experts: int) -> tuple[Tiles, Tiles]:
    """Most experts have all their pairs in one tile."""
    mean = tokens * k / experts
    pairs = next((size for size in TILES if size >= min(tokens, 1.5 * mean)), 128)
    if dtype == torch.float32:
        # Twice the shared memory, and no matrix unit to feed.
        return (Tiles(min(pairs, 32), 32, 32, 4, 2, False),) * 2
    return TILES[pairs]
