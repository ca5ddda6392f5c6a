"""The sampling part of a plan as the sampler sees it: tensors from one packed upload, and what the host knows of them.

Rows are sorted out here, on the host: which are penalised, which draw at all, which of those need their vocabulary
ordered. So the device never asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.base.plan import Plan, Sampling


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows that are penalised for tokens seen before, and those tokens. Lines count the penalised rows."""

    row: Tensor  # [lines] sampled row
    repetition: Tensor  # [lines]
    presence: Tensor  # [lines]
    frequency: Tensor  # [lines]
    line: Tensor  # [history]
    token: Tensor  # [history]
    generated: Tensor  # [history] float: 1 if the token is part of the answer, 0 if of the prompt
    # Rows whose input token only the board knows: it belongs to their history too.
    board_line: Tensor  # [from board]
    board_seat: Tensor  # [from board]


@dataclass(frozen=True, slots=True)
class Biases:
    row: Tensor  # [biases] sampled row
    token: Tensor  # [biases]
    value: Tensor  # [biases]


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that draw their token at random; the others take the likeliest."""

    row: Tensor  # [draws] sampled row
    temperature: Tensor  # [draws]
    log_min_p: Tensor  # [draws] minus infinity is off
    uniform: Tensor  # [draws]
    ordered: tuple[bool, ...]  # host: whether top-k or top-p apply, so that the vocabulary has to be ordered
    top_k: Tensor  # [draws] the vocabulary's size is off
    top_p: Tensor  # [draws]


@dataclass(frozen=True, slots=True)
class Choices:
    """How all sampled rows of a step choose. None: no row needs it."""

    index: Tensor  # [sampled] packed index of each row's last token
    seat: Tensor  # [sampled] where its choice goes on the token board
    penalties: Penalties | None
    biases: Biases | None
    draws: Draws | None
    top: int | None  # how many likely tokens to report; None: no log-probabilities at all
    score_index: Tensor  # [scores] packed index of prompt tokens' logits
    score_token: Tensor  # [scores]


class _Pack:
    """Collects arrays, then hands out views of one uploaded buffer, in the order they came."""

    def __init__(self) -> None:
        self.pieces: list[NDArray[np.int32]] = []
        self.kinds: list[bool] = []

    def put(self, array: NDArray[np.generic]) -> int:
        floating = bool(np.issubdtype(array.dtype, np.floating))
        self.pieces.append(array.astype(np.float32).view(np.int32) if floating else array.astype(np.int32))
        self.kinds.append(floating)
        return len(self.pieces) - 1

    def upload(self, device: torch.device) -> list[Tensor]:
        packed = torch.from_numpy(np.concatenate(self.pieces)).to(device, non_blocking=True)
        parts = packed.split([len(piece) for piece in self.pieces])
        return [part.view(torch.float32) if floating else part.long() for part, floating in zip(parts, self.kinds)]


def prepare(plan: Plan, vocab_size: int, device: torch.device) -> Choices:
    """Sort out the rows of a plan and upload what the sampler needs."""
    sampling = plan.sampling
    pack = _Pack()
    last = np.cumsum(plan.end - plan.start) - 1
    shared = [pack.put(a) for a in (last[plan.sampled], plan.seat[plan.sampled], plan.score_index, plan.score_token)]
    penalised = drawn = biased = ordered = None
    if not sampling.all_greedy:
        penalised = _put_penalties(pack, plan)
        drawn, ordered = _put_draws(pack, sampling, vocab_size)
        if len(sampling.bias_row):
            biased = [pack.put(a) for a in (sampling.bias_row, sampling.bias_token, sampling.bias_value)]
    tensors = pack.upload(device)
    index, seat, score_index, score_token = (tensors[i] for i in shared)
    return Choices(
        index=index,
        seat=seat,
        penalties=None if penalised is None else Penalties(*(tensors[i] for i in penalised)),
        biases=None if biased is None else Biases(*(tensors[i] for i in biased)),
        draws=None if drawn is None else _draws([tensors[i] for i in drawn], ordered or ()),
        top=int(sampling.top_logprobs.max(initial=0)) if sampling.wants_logprobs else None,
        score_index=score_index,
        score_token=score_token,
    )


def _put_penalties(pack: _Pack, plan: Plan) -> list[int] | None:
    sampling = plan.sampling
    on = sampling.repetition_penalty != 1
    on |= (sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0)
    if not on.any():
        return None
    row = np.flatnonzero(on)
    line_of_row = np.cumsum(on) - 1
    ours = on[sampling.history_row]
    from_board = plan.from_board[plan.sampled[row]] != 0
    arrays = (
        row,
        sampling.repetition_penalty[row],
        sampling.presence_penalty[row],
        sampling.frequency_penalty[row],
        line_of_row[sampling.history_row[ours]],
        sampling.history_token[ours],
        sampling.history_generated[ours].astype(np.float32),
        np.flatnonzero(from_board),
        plan.seat[plan.sampled[row[from_board]]],
    )
    return [pack.put(array) for array in arrays]


def _put_draws(pack: _Pack, sampling: Sampling, vocab_size: int) -> tuple[list[int] | None, tuple[bool, ...]]:
    # The likeliest of one token is that token: no draw, and no ties to think about.
    row = np.flatnonzero((sampling.temperature > 0) & (sampling.top_k != 1))
    if not len(row):
        return None, ()
    top_k = sampling.top_k[row]
    top_k = np.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
    top_p = sampling.top_p[row]
    with np.errstate(divide="ignore"):
        log_min_p = np.log(sampling.min_p[row])
    arrays = (row, sampling.temperature[row], log_min_p, sampling.uniform[row], top_k, top_p)
    return [pack.put(array) for array in arrays], tuple(((top_k < vocab_size) | (top_p < 1)).tolist())


def _draws(tensors: list[Tensor], ordered: tuple[bool, ...]) -> Draws:
    row, temperature, log_min_p, uniform, top_k, top_p = tensors
    return Draws(row, temperature, log_min_p, uniform, ordered, top_k, top_p)
