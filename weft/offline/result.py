"""Results of the offline API: a whole answer, or a chunk of one. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.answers.followed import FollowedAnswer, Piece, digests_of
from weft.engine.events import Output
from weft.memory.misses import Miss


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a token (temperature 1, no penalties), and of the most likely ones at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added to a stream; the text may be empty while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] | None
    finish_reason: str | None = None
    # The whole answer, set on the last chunk.
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """An answer and its cost.

    `finish_reason` is "stop", "length", "abort" or "error" (then `error` says why). `stop_reason` is the stop string or
    stop token that ended the answer, None for the model's own end token. `cached_tokens` of the prompt were reused;
    `miss` is why not more, as a value, and `why_not_more` in words.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[TokenScore] | None
    prompt_logprobs: list[TokenScore | None] | None
    prompt_token_ids: list[int]
    cached_tokens: int
    loaded_tokens: int
    miss: Miss | None
    preemptions: int = 0
    error: str | None = None
    digests: list[str] | None = None  # of the logits of each token, if asked for
    disk_tokens: int = 0  # of the loaded ones
    remote_tokens: int = 0  # of the loaded ones

    @property
    def why_not_more(self) -> str:
        return "" if self.miss is None else self.miss.sentence


def result_of(followed: FollowedAnswer) -> Result:
    """Return the result of an answer that has ended."""
    assert followed.finish is not None
    answer, report = followed.answer, followed.report
    return Result(
        text=answer.text,
        token_ids=answer.tokens,
        finish_reason=str(followed.finish),
        stop_reason=answer.stop_reason,
        logprobs=None if followed.request.params.logprobs is None else scores_of(followed.outputs),
        prompt_logprobs=_prompt_scores(followed),
        prompt_token_ids=followed.request.prompt.tolist(),
        cached_tokens=report.cached_tokens,
        loaded_tokens=report.loaded_tokens,
        disk_tokens=report.disk_tokens,
        remote_tokens=report.remote_tokens,
        miss=report.miss,
        preemptions=report.preemptions,
        error=followed.error,
        digests=digests_of(followed) if followed.request.params.logits_digest else None,
    )


def chunk_of(piece: Piece, scored: bool, result: Result | None) -> Chunk:
    """Return a piece as a chunk of a stream; the last one has the result."""
    return Chunk(
        text=piece.text,
        token_ids=tuple(output.token for output in piece.outputs if output.token is not None),
        logprobs=tuple(scores_of(piece.outputs)) if scored else None,
        finish_reason=None if piece.finish is None else str(piece.finish),
        result=result,
    )


def scores_of(outputs: Iterable[Output]) -> list[TokenScore]:
    return [
        TokenScore(output.token, output.logprob, tuple(output.top or ()))
        for output in outputs
        if output.token is not None and output.logprob is not None
    ]


def _prompt_scores(followed: FollowedAnswer) -> list[TokenScore | None] | None:
    params, prompt = followed.request.params, followed.request.prompt.tolist()
    if params.prompt_logprobs is None:
        return None
    first = 1 + min(params.prompt_logprobs_start, len(prompt) - 1)
    scores: list[TokenScore | None] = [None] * first
    known = zip(prompt[first:], followed.report.prompt_scores)
    return scores + [TokenScore(token, score.logprob, tuple(score.top)) for token, score in known]
