"""Results of the offline API: a whole answer, or a chunk of one. No torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    miss: Miss | None
    preemptions: int = 0
    error: str | None = None

    @property
    def why_not_more(self) -> str:
        return "" if self.miss is None else self.miss.sentence
