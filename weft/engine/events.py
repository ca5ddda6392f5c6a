"""What the engine returns: a token or an end per sequence and step, and a report at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weft.base.plan import Scores
from weft.memory.misses import Miss
from weft.wire.messages import Count, MutableMessage, Number, Seconds, Text, Token

MAX_TOPS = 32
Top = list[tuple[Token, float]]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Output(MutableMessage):
    """Output of one step for one sequence. Without a token, the sequence only finished.

    `error` says why it failed; `error_field` is the field of the request at fault, if one is.
    """

    sequence: Number
    token: Token | None
    logprob: float | None = None
    top: Annotated[Top, Meta(max_length=MAX_TOPS)] | None = None
    finish: FinishReason | None = None
    error: Text | None = None
    error_field: Text | None = None
    digest: int | None = None  # of the logits, as a signed integer
    drafted: bool = False  # an accepted draft; known of tokens with log-probabilities


@dataclass(slots=True)
class PromptScore:
    """Log-probability of one prompt token, and of the most likely ones at its position."""

    logprob: float
    top: Top


class PromptScores:
    """Scores of a prompt's tokens, in order, as arrays: an object per score would take ten times the memory."""

    __slots__ = ("_length", "_pieces")

    def __init__(self, scores: Iterable[PromptScore] = ()) -> None:
        self._pieces: list[Scores] = []
        self._length = 0
        if known := list(scores):
            tops = [zip(*score.top, strict=True) if score.top else ((), ()) for score in known]
            tokens, logprobs = zip(*tops, strict=True)
            chosen = np.array([score.logprob for score in known], np.float32)
            self.add(Scores(chosen, np.array(tokens, np.int32), np.array(logprobs, np.float32)))

    def add(self, piece: Scores) -> None:
        """Append scores. All pieces of a prompt have the same number of most likely tokens."""
        self._pieces.append(piece)
        self._length += len(piece.chosen)

    def pieces(self, most: int) -> Iterator[Scores]:
        """Yield the scores again, at most `most` tokens at a time."""
        for piece in self._pieces:
            for first in range(0, len(piece.chosen), most):
                yield piece.part(first, first + most)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PromptScore]:
        for piece in self._pieces:
            tops = zip(piece.top_token.tolist(), piece.top_logprob.tolist(), strict=True)
            for logprob, (tokens, logprobs) in zip(piece.chosen.tolist(), tops, strict=True):
                yield PromptScore(logprob, list(zip(tokens, logprobs, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptScores) and list(self) == list(other)


class VectorSum:
    """The sum of the hidden states of a prompt's tokens so far, in double precision. `tokens` counts them."""

    __slots__ = ("_sum", "tokens")

    def __init__(self, vector: NDArray[np.float32] | None = None) -> None:
        self._sum: NDArray[np.float64] | None = None
        self.tokens = 0
        if vector is not None:
            self.add(vector, 1)

    def add(self, vector: NDArray[np.float32], tokens: int) -> None:
        """Add the sum of the next tokens."""
        self._sum = vector.astype(np.float64) if self._sum is None else self._sum + vector
        self.tokens += tokens

    @property
    def mean(self) -> NDArray[np.float32] | None:
        return None if self._sum is None else (self._sum / self.tokens).astype(np.float32)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VectorSum) or self._sum is None or other._sum is None:
            return isinstance(other, VectorSum) and self._sum is other._sum
        return self.tokens == other.tokens and np.array_equal(self._sum, other._sum)


@dataclass(slots=True)
class DraftReport:
    """Drafts of one sequence: proposed and accepted, and those of them that came from the caller's prediction."""

    proposed: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    rows: int = 0  # rows of steps that had drafts

    def add(self, drafters: list[str], accepted: int) -> None:
        """Count a verified row by the drafter of each draft."""
        self.rows += 1
        self.proposed += len(drafters)
        self.accepted += accepted
        self.predicted += drafters.count("prediction")
        self.predicted_accepted += drafters[:accepted].count("prediction")


class Report(MutableMessage):
    """Facts about a sequence besides its tokens. `prompt_scores` starts after position `prompt_logprobs_start`.

    Between processes, the scores travel before the rest, in pieces, and so does the vector.
    """

    cached_tokens: Count = 0
    loaded_tokens: Count = 0  # of the cached ones, those that were copied from another tier first
    disk_tokens: Count = 0  # of the loaded ones, those from disk
    remote_tokens: Count = 0  # of the loaded ones, those from a remote store
    miss: Miss | None = None
    preemptions: Count = 0
    queued_seconds: Seconds = 0.0  # before it first ran
    prompt_scores: PromptScores = msgspec.field(default_factory=PromptScores)
    drafts: DraftReport = msgspec.field(default_factory=DraftReport)
    vector: VectorSum = msgspec.field(default_factory=VectorSum)
    loading_seconds: Seconds = 0.0  # of the queued ones, those in which its prefix was loaded from another tier
