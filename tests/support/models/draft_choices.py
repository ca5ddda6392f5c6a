"""What each token of an answer was chosen from, and whether rounding alone explains two different choices.

A token depends on the logits after masks, penalties, biases and bans, on the request's parameters, and on the random
number of its place in the answer. So these are compared at every token, whether or not the tokens are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tests.support.models.near_ties import Computed, NearTies, repeated
from weft.base.plan import BANNED, Plan
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.seat_sampling import uniform
from weft.engine.sequence import Sequence
from weft.kernels.cpu.sampling import least_likely_kept
from weft.runner.runner import Flight, Runner
from weft.runner.sampler import adjust
from weft.runner.step_sampling import StepSampling

# Logits that differ by more are not the same sums in another order. Of 3,379 tokens of OLMo-Hybrid the median is 2e-6
# and the greatest 1e-4. A token of wrong memory, or with a penalty too few, differs by tenths.
MOST_ROUNDING = 1e-3


@dataclass(frozen=True)
class Choice:
    """What a token was chosen from: the adjusted logits, and the random number unless the choice is greedy."""

    logits: Float[Tensor, " vocab"]
    uniform: float | None
    raw: Float[Tensor, " vocab"]  # before they were adjusted


class Choices:
    """Keeps the choices of a runner, by sequence and position of the chosen token; the last one after refused drafts.

    `find` returns the sequence in a seat.
    """

    def __init__(self, runner: Runner) -> None:
        self.find: Callable[[int], Sequence | None] = lambda seat: None
        self._found: dict[tuple[int, int], Choice] = {}
        # Of the step that is launched: the sequence of each sample, its position, and the seat of its row if that
        # follows drafts in flight.
        self._places: list[tuple[int, int, int | None]] = []
        self._runner = runner
        self._launch, self._run, self._decide = runner.launch, runner.run, runner.decide
        runner.launch, runner.run, runner.decide = self.launch, self.run, self.decide

    def leave(self) -> None:
        """Keep nothing from now on: another engine uses the runner."""
        runner = self._runner
        runner.launch, runner.run, runner.decide = self._launch, self._run, self._decide

    def take(self, sequence: int, position: int) -> Choice:
        return self._found.pop((sequence, position))

    def launch(self, plan: Plan) -> Flight:
        self._note(plan)
        return self._launch(plan)

    def run(self, plan: Plan, planned: Plan | None = None) -> Flight:
        """Note the places of a plan whose rows have been moved. Recorded steps of a GPU move their rows themselves."""
        self._note(plan)
        return self._run(plan, planned)

    def _note(self, plan: Plan) -> None:
        row, index = plan.samples
        length = plan.end - plan.start
        position = (plan.start + length - np.cumsum(length))[row] + index + 1
        follows = plan.drafts.unverified_before[row] > 0 if plan.drafts.may_move else np.zeros(len(row), bool)
        seats = plan.seat[row]
        self._places = [
            (self.find(seat).id, at, seat if moves else None)
            for seat, at, moves in zip(seats.tolist(), position.tolist(), follows.tolist(), strict=True)
        ]

    def decide(
        self, logits: Float[Tensor, "rows vocab"], sampling: StepSampling, inputs: Int[Tensor, " tokens"]
    ) -> Int[Tensor, " rows"]:
        # The runner samples a plan before the next is launched, also one whose masks follow.
        adjusted = adjust(logits, sampling, inputs, self._runner.operations).clone().cpu()
        raw, draws = logits.float().clone().cpu(), sampling.draws
        numbers = {} if draws is None else dict(zip(draws.row.tolist(), draws.uniform.tolist(), strict=True))
        moved = self._runner.placed.boards.moved.tolist()
        for sample, (owner, position, seat) in enumerate(self._places):
            place = position if seat is None else position - moved[seat]
            self._found[owner, place] = Choice(adjusted[sample], numbers.get(sample), raw[sample])
        return self._decide(logits, sampling, inputs)


def watch(engine: Engine) -> Choices:
    """Keep the choices of an engine."""
    choices = Choices(engine._device)
    choices.find = engine.planner.by_seat.__getitem__
    return choices


def check_inputs(params: SamplingParams, place: int, plain: Choice, drafted: Choice, exact: bool) -> float:
    """Raise if two choices at a place of an answer differ by more than rounding; return the difference of logits."""
    difference = difference_of(params, place, plain, drafted)
    assert difference <= (0 if exact else MOST_ROUNDING), f"the logits of token {place} differ by {difference}"
    return difference


def difference_of(params: SamplingParams, place: int, plain: Choice, drafted: Choice) -> float:
    """Return how much the logits of two choices differ. Raise if their random numbers do, or the banned tokens."""
    expected = None
    if params.temperature > 0 and params.top_k != 1:
        expected = float(uniform(np.array([params.seed], np.uint64), np.array([place]))[0])
    assert (plain.uniform, drafted.uniform) == (expected, expected), f"token {place} has another random number"
    one, other = plain.logits, drafted.logits
    banned = one < BANNED / 2
    assert torch.equal(banned, other < BANNED / 2), f"other tokens are banned at {place}"
    return float((one - other)[~banned].abs().max()) if not banned.all() else 0.0


def tied(params: SamplingParams, text: list[int], plain: Choice, drafted: Choice, ties: NearTies) -> bool:
    """Return whether the logits of two choices after a text differ because its experts tie.

    Each run's are those of some decision of the ties, and are then adjusted in the same way.
    """
    pair = plain, drafted
    added, other = (choice.logits - repeated(text, params, choice.raw) for choice in pair)
    allowed = plain.logits >= BANNED / 2
    if not allowed.any() or (added - other)[allowed].abs().max() > MOST_ROUNDING:
        return False
    return ties.explain(text, *(partial(_agrees, choice.raw) for choice in pair))


def _agrees(raw: Float[Tensor, " vocab"], computed: Computed) -> bool:
    return bool((raw - computed.logits).abs().max() <= MOST_ROUNDING)


def chosen(params: SamplingParams, choice: Choice) -> int:
    """Return the token that a request's parameters choose."""
    if choice.uniform is None:
        return int(choice.logits.argmax())
    cumulative = distribution(params, choice.logits)
    return int(torch.searchsorted(cumulative, choice.uniform * cumulative[-1], right=True))


def distribution(params: SamplingParams, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """Return the cumulative probabilities of the tokens that the request's filters keep."""
    scaled = (logits - logits.max())[None] / params.temperature
    least = torch.tensor([[params.min_p]], dtype=torch.float32).log()
    if params.top_k or params.top_p < 1:
        top_k = torch.tensor([params.top_k or len(logits)])
        least = least_likely_kept(scaled, least, top_k, torch.tensor([params.top_p]))
    return scaled.masked_fill(scaled < least, -torch.inf).softmax(-1).cumsum(-1, dtype=torch.float64)[0]
