"""Choice of the expert kernels and their block sizes by number of tokens, measured on an H200.

`python -m benchmarks.kernel_moe` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.kernels.cuda.linear.vectors import LOADS, Vectors

# Up to this number of pairs per expert, every pair reads its expert's weights separately.
FEW_PAIRS = 0.3
# With more tokens than this, an expert's pairs are cut into tiles that are computed in parallel.
WHOLE_TOKENS = 256
# With more than this, torch's grouped matmul is faster, where available.
TILED_TOKENS = 1024
# Pairs that a program reads at a time to list those of its expert: the fewest that hold all, if any do.
LIST_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of a grouped matmul: pairs and outputs per program, inputs per iteration."""

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    weights_first: bool  # weights are the first operand of the matmul, which needs 64 outputs to be fast


# By the number of pairs per tile.
TILES = {
    16: (Tiles(16, 32, 256, 4, 3, False), Tiles(16, 64, 64, 4, 6, True)),
    32: (Tiles(32, 64, 128, 4, 4, True), Tiles(32, 128, 64, 4, 4, True)),
    64: (Tiles(64, 64, 64, 4, 6, True), Tiles(64, 128, 64, 4, 4, True)),
    128: (Tiles(128, 128, 64, 8, 3, True), Tiles(128, 128, 64, 8, 4, True)),
}


def vectors(hidden: int, inner: int, k: int) -> tuple[Vectors, Vectors]:
    """Return blocks for the first and the second matmul. The second's programs read a row of every choice at once.

    >>> vectors(2048, 1792, 4), vectors(2880, 2880, 4)
    ((Vectors(rows=1, warps=4), Vectors(rows=2, warps=8)), (Vectors(rows=2, warps=4), Vectors(rows=1, warps=4)))
    >>> vectors(4096, 768, 10), vectors(2048, 512, 8)
    ((Vectors(rows=2, warps=8), Vectors(rows=2, warps=4)), (Vectors(rows=1, warps=4), Vectors(rows=2, warps=2)))
    """
    first = Vectors(1, 4 if hidden <= 2048 or hidden % 2048 else 8)
    # Gate and up are read together.
    if hidden > 2048 and 4 * first.pieces(hidden) <= LOADS:
        first = replace(first, rows=2)
    # One piece per row, or pieces not much wider than the remainder.
    warps = next((warps for warps in (1, 2, 4, 8) if inner <= Vectors(1, warps).columns), 4)
    second = Vectors(1, warps)
    return first, second if 2 * k * second.pieces(inner) > LOADS else replace(second, rows=2)


def tiles(dtype: torch.dtype, tokens: int, k: int, experts: int) -> tuple[Tiles, Tiles]:
    """Return tiles so that most experts have all their pairs in one."""
    pairs = next((size for size in TILES if tokens <= most_tokens(size, k, experts)), 128)
    if dtype == torch.float32:
        # Twice the shared memory, and no matrix unit to feed.
        return (Tiles(min(pairs, 32), 32, 32, 4, 2, False),) * 2
    return TILES[pairs]


def most_tokens(pairs: int, k: int, experts: int) -> int:
    """Return up to how many tokens a tile of this size has room for one and a half times an expert's mean."""
    return max(pairs, 2 * pairs * experts // (3 * k))


def last_tokens(k: int, experts: int) -> list[int]:
    """Return the numbers of tokens after which other kernels are launched: steps of these launch all but the last.

    >>> last_tokens(8, 256)[-4:]
    [682, 1024, 1365, 2730]
    """
    whole = [1, int(FEW_PAIRS * experts / k), (experts - 1) // k, WHOLE_TOKENS, TILED_TOKENS]
    lists = [block // k for block in LIST_BLOCKS[:-1]]
    return sorted({*whole, *lists, *(most_tokens(pairs, k, experts) for pairs in TILES)} - {0})
