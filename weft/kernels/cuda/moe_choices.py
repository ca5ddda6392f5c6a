"""Which way experts are computed on a GPU for so many tokens, and in which blocks: figures of an H200.

`python -m benchmarks.kernel_moe` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Up to so many tokens every pair reads its expert's weights for itself.
FEW_TOKENS = 2
# Beyond so many, in bfloat16, torch's grouped product is faster than ours.
SOME_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Vectors:
    """Blocks of a product with a vector: so many rows and columns of the matrix."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of a grouped product: so many outputs at once, inputs at a time; pairs are set by their number."""

    outputs: int
    inputs: int
    warps: int
    stages: int
    weights_first: bool  # which operand of the product the weights are: the first needs 64 outputs to be fast


VECTORS = (Vectors(rows=8, columns=512, warps=4, stages=3), Vectors(rows=8, columns=512, warps=4, stages=3))
TILES = (
    Tiles(outputs=32, inputs=128, warps=4, stages=4, weights_first=False),
    Tiles(outputs=64, inputs=128, warps=4, stages=4, weights_first=False),
)
# Float32 needs twice the shared memory and has no matrix unit to feed.
WIDE_TILES = (
    Tiles(outputs=32, inputs=32, warps=4, stages=2, weights_first=False),
    Tiles(outputs=32, inputs=32, warps=4, stages=2, weights_first=False),
)


def tiles(dtype: torch.dtype) -> tuple[Tiles, Tiles]:
    return WIDE_TILES if dtype == torch.float32 else TILES


def pairs_at_once(tokens: int, k: int, experts: int) -> int:
    """How many pairs of an expert are multiplied together: most experts need one round.

    >>> pairs_at_once(8, 4, 32), pairs_at_once(128, 4, 32), pairs_at_once(512, 10, 72)
    (16, 32, 128)
    """
    mean = tokens * k / experts
    return next((size for size in (16, 32, 64) if size >= min(tokens, 1.5 * mean)), 128)
