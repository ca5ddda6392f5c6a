"""Scripted verification in one kernel, so that a step of `benchmarks.drafts` costs what it costs in an engine."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.following import DraftSamples


@triton.jit
def verify_kernel(tokens, seat, sample, count, right, turns, board, refused, SCRIPTED: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0)
    drafts = tl.load(count + row)
    if drafts > 0:
        own = tl.load(seat + row).to(tl.int64)
        turn = tl.load(turns + own)
        accepted = tl.minimum(tl.load(right + own * SCRIPTED + turn % SCRIPTED), drafts)
        token = tl.load(tokens + tl.load(sample + row) + accepted)
        tl.store(board + own, token.to(board.dtype.element_ty))
        tl.store(refused + own, (drafts - accepted).to(refused.dtype.element_ty))
        tl.store(turns + own, turn + 1)


def verify(tokens: Tensor, rows: DraftSamples, right: Tensor, turns: Tensor, board: Tensor, refused: Tensor) -> None:
    """Accept `right[seat, turn]` drafts of each row, and count its seat's turn in `turns`."""
    verify_kernel[(len(rows.seat),)](
        tokens, rows.seat, rows.sample, rows.count, right, turns, board, refused, right.shape[1], num_warps=1
    )
