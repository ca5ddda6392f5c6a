"""How the state space kernels cut their work: choices measured on an H200, kept so that no first request tunes.

`python -m benchmarks.kernel_ssd` measures them again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Programs that run at once: one on each multiprocessor of a large GPU.
AT_ONCE = 132


class DecodeChoice(NamedTuple):
    block: int  # columns of the state that are read at a time
    blocks: int  # of a program
    stages: int
    warps: int
    recall_block: int = 64  # the same of programs that read tails
    recall_blocks: int = 1
    recall_warps: int = 4


class CellsChoice(NamedTuple):
    block: int  # columns of a head that a program takes
    stages: int
    warps: int


def decode_choice(rows: int, groups: int, width: int) -> DecodeChoice:
    """For groups of `width` columns: programs that recall are long once there are many, for each weighs its tokens anew.

    >>> decode_choice(128, 8, 1280).recall_blocks, decode_choice(1, 8, 1280).recall_blocks
    (5, 1)
    """
    blocks = -(-width // 64)
    for count in (5, 4):
        if blocks % count == 0 and rows * groups * blocks // count >= 16 * AT_ONCE:
            return DecodeChoice(64, 1, 1, 4, recall_blocks=count)
    return DecodeChoice(64, 1, 1, 4)


def cells_choice(rows: int, heads: int, head_dim: int, state: int, dtype: torch.dtype) -> CellsChoice:
    # Products of less than 64 columns by a whole warp group read beyond their operands (Triton 3.6): two warps do not.
    if dtype == torch.float32:
        return CellsChoice(16, 1, 8 if state > 128 else 4 if state >= 64 else 2)
    if head_dim < 64:
        return CellsChoice(max(16, 1 << (head_dim - 1).bit_length()), 2, 2)
    if state > 128:
        return CellsChoice(64, 2, 8)
    # Two stages leave room for a second program beside the first, if there is one.
    return CellsChoice(64, 3 if rows * heads * -(-head_dim // 64) <= AT_ONCE else 2, 4)
