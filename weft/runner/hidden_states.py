"""The model's final hidden states by seat, for the positions that its MTP head has not read yet.

They lie in one buffer that never moves, so recorded steps can write and read it.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.base.config import MOST_DRAFTS
from weft.base.parts import ranges
from weft.base.plan import Longs, Plan
from weft.drafting.state_lines import StateLines
from weft.kernels.following import DraftSamples


class DraftBoard:
    """What follows the last token of a seat that the host knows, on the device: `tokens` [seats + 1, most].

    First what its last verification chose, of which all after the first `refused` ones do not count, then what the head
    drafts after it. The last line is that of padding.
    """

    def __init__(self, seats: int, device: torch.device | str) -> None:
        self.tokens = torch.zeros(seats + 1, MOST_DRAFTS + 1, dtype=torch.int32, device=device)
        self.refused, self._last = (torch.zeros(seats + 1, dtype=torch.int32, device=device) for _ in range(2))
        self._place = torch.arange(MOST_DRAFTS + 1, dtype=torch.int32, device=device)

    def verified(self, tokens: Int[Tensor, " samples"], rows: DraftSamples, refused: Int[Tensor, " seats"]) -> None:
        """Keep the samples of rows with drafts, and how many drafts were wrong. Lines of other rows are overwritten."""
        place = rows.sample[:, None] + self._place
        self.tokens[rows.seat] = tokens[place.clamp(max=len(tokens) - 1)].to(self.tokens.dtype)
        self.refused[rows.seat] = refused[rows.seat]

    def drafted(self, tokens: Int[Tensor, " n"], seat: Int[Tensor, " n"], continues: Int[Tensor, " n"]) -> None:
        """Keep a draft of each seat: the first one, or if it `continues` the next one."""
        place = (self._last[seat] + 1) * continues
        self._last[seat] = place
        self.tokens[seat, place] = tokens.to(self.tokens.dtype)

    def read(self, ids: Int[Tensor, " tokens"], place: Int[Tensor, " tokens"]) -> None:
        """Replace the tokens that have a place on the board; that of others is negative."""
        ids.copy_(torch.where(place < 0, ids, self.tokens.view(-1)[place.clamp(min=0)].to(ids.dtype)))


def draft_places(plan: Plan) -> Longs:
    """Return the place of each token of a plan on the board of drafts; negative, if the host knows the token."""
    length = (plan.end - plan.start).astype(np.int64)
    place, owners = ranges(plan.drafts.on_device - length, length)
    return np.where(place < 0, -1, plan.seat[owners].astype(np.int64) * (MOST_DRAFTS + 1) + place)


class HiddenStates:
    """The states that a head is to read, in the lines of `rows`, and the board of its drafts."""

    def __init__(self, rows: StateLines, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self.lines = torch.zeros(rows.padding + 1, width, dtype=dtype, device=device)
        self.board = DraftBoard(len(rows.first), device)

    def write(self, lines: Int[Tensor, " n"], states: Float[Tensor, "n hidden"]) -> None:
        self.lines[lines] = states.to(self.lines.dtype)

    def read(self, lines: Int[Tensor, " n"]) -> Float[Tensor, "n hidden"]:
        return self.lines[lines]
