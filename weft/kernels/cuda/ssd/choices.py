"""Launch configurations of the state space kernels, measured on an H200 and fixed, so that no request waits for tuning.

`python -m benchmarks.kernel_ssd` measures them again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.kernels.cuda.launch.gpus import Gpu


class DecodeChoice(NamedTuple):
    block: int  # columns computed at a time
    blocks: int  # per program
    stages: int
    warps: int


# Programs of one block are the fastest for any number of rows: they issue all loads at once.
DECODE = DecodeChoice(64, 1, 1, 4)
# With more rows, programs that start early block the kernel that they wait for.
EARLY_ROWS = 16


class CellsChoice(NamedTuple):
    block: int  # columns of a head per program
    stages: int
    warps: int


class ShortChoice(NamedTuple):
    block: int  # columns of a group per program
    warps: int
    closed: int  # lines of a state that are closed at a time
    registers: int | None  # maximum per thread


# Heads of rows of a few tokens that are weighed together.
SHORT_HEADS = 16


def weighed_part(state: int, dtype: torch.dtype) -> int:
    """Return how much of every key and query is multiplied at once: float32 ones of large states fill the registers."""
    return 32 if dtype == torch.float32 and state > 128 else state


def short_choice(state: int, dtype: torch.dtype) -> ShortChoice:
    if state > 128:
        return ShortChoice(32, 4, 32, None)
    if dtype == torch.float32:
        return ShortChoice(64, 4, min(32, state), None)
    # The bound was the fastest of those measured; why is not known.
    return ShortChoice(64, 4, min(64, state), 128)


def cells_choice(rows: int, heads: int, head_dim: int, state: int, dtype: torch.dtype, gpu: Gpu) -> CellsChoice:
    # Matmuls of less than 64 columns by a whole warp group read beyond their operands (Triton 3.6); with two warps they
    # do not.
    if dtype == torch.float32:
        return CellsChoice(16, 1, 8 if state > 128 else 4 if state >= 64 else 2)
    if head_dim < 64:
        return CellsChoice(max(16, 1 << (head_dim - 1).bit_length()), 2, 2)
    if state > 128:
        return CellsChoice(64, 2, 8)
    # Two stages leave room for a second program on the multiprocessor, if there is one.
    return CellsChoice(64, 3 if rows * heads * -(-head_dim // 64) <= gpu.multiprocessors else 2, 4)
