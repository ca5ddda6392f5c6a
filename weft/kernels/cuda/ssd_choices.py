"""How the state space kernels cut their work: choices measured on an H200, kept so that no first request tunes."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Enough programs to fill the multiprocessors of a large GPU.
MANY_PROGRAMS = 132


class DecodeChoice(NamedTuple):
    block: int  # columns that are computed at a time
    blocks: int  # of a program
    stages: int
    warps: int


class CellsChoice(NamedTuple):
    block: int  # columns of a head that a program takes
    rest: int  # and as many beyond them, or 0
    stages: int
    warps: int


def decode_choice(
    rows: int, groups: int, group_heads: int, head_dim: int, state: int, dtype: torch.dtype
) -> DecodeChoice:
    blocks = -(-group_heads * head_dim // 64)
    for count in (5, 4, 2):
        if blocks % count == 0 and rows * groups * blocks // count >= 8 * MANY_PROGRAMS:
            return DecodeChoice(64, count, 2, 4)
    return DecodeChoice(64, 1, 1, 4)


def cells_choice(rows: int, heads: int, head_dim: int, state: int, dtype: torch.dtype) -> CellsChoice:
    # Products of less than 64 columns by a whole warp group read beyond their operands (Triton 3.6): two warps do not.
    if dtype == torch.float32:
        return CellsChoice(16, 0, 1, 4 if state >= 64 else 2)
    if head_dim < 64:
        return CellsChoice(max(16, 1 << (head_dim - 1).bit_length()), 0, 2, 2)
    if head_dim == 80:
        return CellsChoice(64, 0, 2, 4)
    return CellsChoice(64, 0, 3, 4) if state <= 128 else CellsChoice(64, 0, 2, 8)
