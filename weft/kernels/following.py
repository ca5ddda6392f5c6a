"""Rows of recorded steps that follow drafts in flight: what the device needs to know to place them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class FollowingRows:
    """Where rows start if drafts in the flight before are wrong (`weft.base.completion`). Rows are those of the batch.

    A row that follows has `unverified` of them, at most one capture in any case, and `width` drafts in a line: those of
    the tokens before its drafts, then its drafts.
    """

    unverified: Tensor  # [rows] 0: the row starts where it says
    earlier_slot: Tensor  # [rows] the checkpoint for starts in the cell before
    capture: Tensor  # [rows] slot of the only capture, or NO_SLOT
    drafts: Tensor  # [longer rows * width]
    width: int


@dataclass(frozen=True, slots=True)
class DraftSamples:
    """Rows with drafts, and where they and their samples are. Rows without drafts are left alone."""

    seat: Tensor  # [rows]
    token: Tensor  # [rows] packed index of the first token; drafts come after it
    sample: Tensor  # [rows] the sample after the first token; those after drafts come next
    count: Tensor  # [rows] drafts
    most: int  # bound of the count
