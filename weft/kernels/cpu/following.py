"""Drafts verified on a CPU, and the rows that follow them."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from weft.kernels.following import DraftSamples
from weft.kernels.plain.following import move_rows

__all__ = ["move_rows", "verify_drafts"]


def verify_drafts(
    tokens: Int[Tensor, " samples"],
    inputs: Int[Tensor, " tokens"],
    rows: DraftSamples,
    board: Int[Tensor, " seats"],
    refused: Int[Tensor, " seats"],
) -> None:
    # A loop over a few numbers: the same with tensors takes twenty operators, of which each takes as long.
    chosen, given = tokens.tolist(), inputs.tolist()
    last, wrong = board.numpy(), refused.numpy()
    facts = zip(rows.seat.tolist(), rows.token.tolist(), rows.sample.tolist(), rows.count.tolist(), strict=True)
    for seat, token, sample, count in facts:
        if not count:
            continue
        right = 0
        while right < count and chosen[sample + right] == given[token + 1 + right]:
            right += 1
        last[seat], wrong[seat] = chosen[sample + right], count - right
