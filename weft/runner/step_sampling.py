"""Sampling part of a plan for the sampler: tensors, and host-side facts about them.

The host sorts rows here: which have penalties, which draw at all, which of those need a sorted vocabulary. So
nothing has to be read from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.base.plan import Plan, Sampling
from weft.device.staging import StagedValue
from weft.kernels.following import DraftSamples
from weft.kernels.sampling import Draws


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties for tokens seen before, and those tokens. Lines count these rows."""

    row: Tensor  # [lines] sample
    repetition: Tensor  # [lines]
    presence: Tensor  # [lines]
    frequency: Tensor  # [lines]
    line: Tensor  # [history]
    token: Tensor  # [history]
    generated: Tensor  # [history] float: 1 if the token was generated, 0 if it is of the prompt
    # Rows whose input token only the device knows: it belongs to their history too.
    input_line: Tensor  # [from board]
    input_index: Tensor  # [from board] packed index of that token


@dataclass(frozen=True, slots=True)
class Masks:
    """Rows restricted to some tokens: those whose bit is set, lowest bit of each byte first."""

    row: Tensor  # [masked] sample
    allowed: Tensor  # [masked, bytes]


@dataclass(frozen=True, slots=True)
class Biases:
    row: Tensor  # [biases] sample
    token: Tensor  # [biases]
    value: Tensor  # [biases]


@dataclass(frozen=True, slots=True)
class Bans:
    """Tokens that a row may not choose if its input token is `input`."""

    row: Tensor  # [bans] sample
    token: Tensor  # [bans]
    input: Tensor  # [bans]
    input_index: Tensor  # [bans] packed index of the row's input token


@dataclass(frozen=True, slots=True)
class StepVectors:
    """Sums of hidden states: the packed index of the first token of each, and how many there are.

    The numbers below a power of two that no count exceeds are `places`.
    """

    index: Tensor  # [vectors]
    count: Tensor  # [vectors]
    places: Tensor  # [width]


@dataclass(frozen=True, slots=True)
class StepSampling:
    """Sampling of all samples of a step. None: no sample needs it."""

    index: Tensor  # [samples] packed index of the token after which it is taken
    seat: Tensor  # [samples] seat on the board of its row
    boarded: Tensor | None  # [boarded] samples that go to the board; None: all of them
    drafts: DraftSamples | None  # rows of the other samples
    masks: Masks | None
    penalties: Penalties | None
    biases: Biases | None
    bans: Bans | None
    draws: Draws | None
    # [draws, positions + 1] random numbers if the row starts 0, 1, ... positions earlier
    earlier_uniform: Tensor | None
    top: int | None  # number of most likely tokens to return; None: no log-probabilities at all
    digests: bool  # whether to return digests of the logits
    score_index: Tensor  # [scores] packed index of prompt tokens' logits
    score_token: Tensor  # [scores]
    vectors: StepVectors | None


def stage_sampling(plan: Plan, vocab_size: int) -> StagedValue:
    """Sort the rows of a plan into a staged `StepSampling`."""
    sampling = plan.sampling
    row, index = plan.samples
    simple = sampling.all_greedy
    fields = {
        "index": index,
        "seat": plan.seat[row],
        "boarded": _boarded(plan, row),
        "drafts": _drafts(plan),
        "masks": None if simple else _masks(sampling, vocab_size),
        "penalties": None if simple else stage_penalties(plan),
        "biases": None if simple else _biases(sampling),
        "bans": None if simple else _bans(plan),
        "draws": None if simple else _draws(sampling, vocab_size),
        "earlier_uniform": None if simple else _earlier_uniform(sampling),
        "top": int(sampling.top_logprobs.max(initial=0)) if sampling.wants_logprobs else None,
        "digests": sampling.wants_digests,
        "score_index": plan.score_index,
        "score_token": plan.score_token,
        "vectors": _vectors(plan),
    }
    return StagedValue(StepSampling, fields)


def _vectors(plan: Plan) -> StagedValue | None:
    if not len(plan.vector_index):
        return None
    places = np.arange(1 << (int(plan.vector_count.max()) - 1).bit_length())
    return StagedValue(StepVectors, {"index": plan.vector_index, "count": plan.vector_count, "places": places})


def _boarded(plan: Plan, row: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the samples of rows without drafts."""
    return np.flatnonzero(plan.drafts.counts[row] == 0) if len(plan.drafts.counts) else None


def _drafts(plan: Plan) -> StagedValue | None:
    if not len(plan.drafts.counts):
        return None
    length, of_row = (plan.end - plan.start).astype(np.int64), np.zeros(plan.rows, np.int64)
    of_row[plan.sampled] = plan.drafts.counts[plan.sampled] + 1
    rows = np.flatnonzero(plan.drafts.counts)
    fields = {
        "seat": plan.seat[rows],
        "token": (np.cumsum(length) - length)[rows],
        "sample": (np.cumsum(of_row) - of_row)[rows],
        "count": plan.drafts.counts[rows],
        "most": int(plan.drafts.counts.max()),
    }
    return StagedValue(DraftSamples, fields)


def _masks(sampling: Sampling, vocab_size: int) -> StagedValue | None:
    if not len(sampling.mask_row):
        return None
    bits = sampling.mask_bits
    if missing := max(0, -(-vocab_size // 32) - bits.shape[1]):
        bits = np.pad(bits, ((0, 0), (0, missing)))
    return StagedValue(Masks, {"row": sampling.mask_row, "allowed": bits.view(np.uint8)})


def stage_penalties(plan: Plan) -> StagedValue | None:
    sampling = plan.sampling
    on = sampling.repetition_penalty != 1
    on |= (sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0)
    if not on.any():
        return None
    row = np.flatnonzero(on)
    line_of_row = np.cumsum(on) - 1
    ours = on[sampling.history_row]
    sampled, _ = plan.samples
    from_board = plan.from_board[sampled[row]] != 0
    fields = {
        "row": row,
        "repetition": sampling.repetition_penalty[row],
        "presence": sampling.presence_penalty[row],
        "frequency": sampling.frequency_penalty[row],
        "line": line_of_row[sampling.history_row[ours]],
        "token": sampling.history_token[ours],
        "generated": sampling.history_generated[ours].astype(np.float32),
        "input_line": np.flatnonzero(from_board),
        "input_index": _input_index(plan, row[from_board]),
    }
    return StagedValue(Penalties, fields)


def _biases(sampling: Sampling) -> StagedValue | None:
    if not len(sampling.bias_row):
        return None
    fields = {"row": sampling.bias_row, "token": sampling.bias_token, "value": sampling.bias_value}
    return StagedValue(Biases, fields)


def _bans(plan: Plan) -> StagedValue | None:
    sampling = plan.sampling
    if not len(sampling.ban_row):
        return None
    fields = {"row": sampling.ban_row, "token": sampling.ban_token, "input": sampling.ban_input}
    return StagedValue(Bans, fields | {"input_index": _input_index(plan, sampling.ban_row)})


def _input_index(plan: Plan, samples: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the packed index of the first token of each sample's row."""
    length = (plan.end - plan.start).astype(np.int64)
    found: NDArray[np.int64] = (np.cumsum(length) - length)[plan.samples[0][samples]]
    return found


def _earlier_uniform(sampling: Sampling) -> NDArray[np.float32] | None:
    row = _drawn(sampling)
    if not len(sampling.earlier_uniform) or not len(row):
        return None
    found: NDArray[np.float32] = np.concatenate([sampling.uniform[:, None], sampling.earlier_uniform], axis=1)[row]
    return found


def _drawn(sampling: Sampling) -> NDArray[np.int64]:
    """Return the samples that are drawn. The most likely of one token is that token: no draw, and no ties."""
    return np.flatnonzero((sampling.temperature > 0) & (sampling.top_k != 1))


def _draws(sampling: Sampling, vocab_size: int) -> StagedValue | None:
    row = _drawn(sampling)
    if not len(row):
        return None
    top_k, top_p = sampling.top_k[row], sampling.top_p[row]
    top_k = np.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(sampling.min_p[row])
    ordered = (top_k < vocab_size) | (top_p < 1)
    fields = {
        "row": row,
        "temperature": sampling.temperature[row],
        "log_min_p": log_min_p,
        "uniform": sampling.uniform[row],
        "filtered": tuple((ordered | (sampling.min_p[row] > 0)).tolist()),
        "ordered": tuple(ordered.tolist()),
        "top_k": top_k,
        "top_p": top_p,
    }
    return StagedValue(Draws, fields)
