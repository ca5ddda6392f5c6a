"""Runner of an MTP head, and the hidden states that it reads from the model's own runner."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from weft.base.plan import Plan
from weft.kernels.staging import StagedValue
from weft.models.mtp import MtpHead
from weft.runner.batching import build_step
from weft.runner.runner import ComputedStep, Runner


class HiddenStates:
    """The model's final hidden states by seat, for the positions that a head has not read yet.

    A seat keeps one interval of positions. What a step writes replaces everything from its first position on, so
    states of wrong drafts are gone when the next step writes. Beyond `most` positions, a seat loses all of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: dict[int, list[tuple[int, Tensor]]] = {}

    def keep(self, plan: Plan, hidden: Float[Tensor, "tokens hidden"]) -> None:
        """Copy the hidden states of a step."""
        first = 0
        for seat, start, end in zip(plan.seat.tolist(), plan.start.tolist(), plan.end.tolist(), strict=True):
            pieces = self._before(seat, start)
            pieces.append((start, hidden[first : first + end - start].clone()))
            first += end - start
            self._pieces[seat] = pieces if end - pieces[0][0] <= self._most else []

    def _before(self, seat: int, start: int) -> list[tuple[int, Tensor]]:
        """Return the pieces of a seat up to a position; none of them if they do not reach it."""
        if start > self.end(seat):
            return []
        return [(at, piece[: start - at]) for at, piece in self._pieces.get(seat, ()) if at < start]

    def first(self, seat: int) -> int:
        pieces = self._pieces.get(seat)
        return pieces[0][0] if pieces else 0

    def end(self, seat: int) -> int:
        pieces = self._pieces.get(seat)
        return pieces[-1][0] + len(pieces[-1][1]) if pieces else 0

    def seats(self) -> list[int]:
        return [seat for seat, pieces in self._pieces.items() if pieces]

    def read(self, seat: int, start: int, end: int) -> Float[Tensor, "tokens hidden"]:
        """Return the states of an interval that was kept."""
        assert self.first(seat) <= start < end <= self.end(seat), "a head reads states that were not kept"
        parts = [piece[max(0, start - at) : max(0, end - at)] for at, piece in self._pieces[seat]]
        return torch.cat(parts)

    def drop(self, seat: int, before: int) -> None:
        """Drop the states before a position: the head has read them, and its entries stand."""
        kept = ((max(at, before), piece[max(0, before - at) :]) for at, piece in self._pieces.get(seat, ()))
        self._pieces[seat] = [(at, piece) for at, piece in kept if len(piece)]

    def forget(self, seat: int) -> None:
        self._pieces.pop(seat, None)


class HeadRunner(Runner):
    """Executes plans of an MTP head. A row's tokens are those after its positions.

    A row whose token is on the board continues from the head's own output at its last sample, any other row from the
    model's hidden states.
    """

    model: MtpHead

    def __init__(self, hidden: HiddenStates, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.hidden_states = hidden
        self._own: dict[int, Tensor] = {}

    def run_layers(self, plan: Plan, staged: StagedValue) -> ComputedStep:
        batch, sampling = build_step(plan, self.spec, self.board, self.device, self.operations, staged)
        hidden = self.model.predict(batch, self.store.views, self._inputs(plan))
        for row, index in zip(*(each.tolist() for each in plan.samples), strict=True):
            self._own[int(plan.seat[row])] = hidden[index : index + 1]
        return ComputedStep(batch, sampling, batch.token_ids, hidden)

    def _inputs(self, plan: Plan) -> Float[Tensor, "tokens hidden"]:
        rows = zip(plan.seat.tolist(), plan.start.tolist(), plan.end.tolist(), plan.from_board.tolist(), strict=True)
        return torch.cat(
            [self._own[seat] if boarded else self.hidden_states.read(seat, a, b) for seat, a, b, boarded in rows]
        )
