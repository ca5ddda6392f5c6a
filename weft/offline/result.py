"""Results of the offline API: a whole answer, or a chunk of one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from weft.answers.followed import FollowedAnswer, Piece, digests_of
from weft.engine.events import FinishReason, Output
from weft.memory.misses import Miss

Decode: TypeAlias = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token. `rank` is its place among the most likely ones, None if it is none of those."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenScore(Mapping[int, Logprob]):
    """Log-probability of a token (temperature 1, no penalties), and of the most likely ones at its position.

    Also a mapping from these tokens to their log-probabilities, the token itself first.

    >>> score = TokenScore(7, -2.0, ((5, -0.5), (7, -2.0)))
    >>> list(score), score[7], score[5].logprob
    ([7, 5], Logprob(logprob=-2.0, rank=2, decoded_token=None), -0.5)
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    decode: Decode | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, token: int) -> Logprob:
        places = {each: (logprob, place) for place, (each, logprob) in enumerate(self.top, start=1)}
        if token not in places and token != self.token:
            raise KeyError(token)
        logprob, rank = places.get(token, (self.logprob, None))
        return Logprob(logprob, rank, None if self.decode is None else self.decode(token))

    def __iter__(self) -> Iterator[int]:
        yield self.token
        yield from (token for token, _ in self.top if token != self.token)

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
class CompletionOutput:
    """One of the answers to a prompt.

    `finish_reason` is "stop", "length", "abort" or "error" (then `error` says why); None: the answer is still growing.
    `stop_reason` is the stop string or stop token that ended it, None for the model's own end token. `logprobs` has a
    mapping from tokens to log-probabilities for each token. `cached_tokens` of the prompt were reused.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenScore] | None = None
    cumulative_logprob: float | None = None
    cached_tokens: int = 0
    error: str | None = None
    digests: list[str] | None = None  # of the logits of each token, if asked for

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Times:
    """When things happened to a request, in seconds since the epoch; `time_in_queue` is a duration."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """The answers to a prompt, `outputs`, and their cost. `text`, `token_ids` and so on are those of the first answer.

    `cached_tokens` of the prompt were reused for the first answer; `miss` is why not more, as a value, and
    `why_not_more` in words. `why_cut` says that the default of `max_tokens` ended an answer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: Times
    prompt_logprobs: list[TokenScore | None] | None = None
    cached_tokens: int = 0
    loaded_tokens: int = 0
    disk_tokens: int = 0  # of the loaded ones
    remote_tokens: int = 0  # of the loaded ones
    miss: Miss | None = None
    preemptions: int = 0
    has_default_length: bool = False
    cache_salt: str | None = None
    forked_tokens: int = 0  # of the prompt, at its end: those of the answer that this one goes on with

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenScore] | None:
        return self.outputs[0].logprobs

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def digests(self) -> list[str] | None:
        return self.outputs[0].digests

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were known, and computed again for lack of a state where an edit or a fork parts from them."""
        if self.forked_tokens:
            return len(self.prompt_token_ids) - self.cached_tokens
        return 0 if self.miss is None else max(0, self.miss.kv_matched - self.miss.cached)

    @property
    def num_cached_tokens(self) -> int:
        return self.cached_tokens

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(each.finished() for each in self.outputs)

    @property
    def why_not_more(self) -> str:
        return "" if self.miss is None else self.miss.sentence

    def after(self, characters: list[int], tokens: list[int]) -> Result:
        """Return only what follows these numbers of characters and tokens of each answer; they are moved on."""
        outputs = []
        for place, each in enumerate(self.outputs):
            shown, known = characters[place], tokens[place]
            characters[place], tokens[place] = len(each.text), len(each.token_ids)
            logprobs = None if each.logprobs is None else each.logprobs[known:]
            outputs.append(replace(each, text=each.text[shown:], token_ids=each.token_ids[known:], logprobs=logprobs))
        return replace(self, outputs=outputs)

    @property
    def why_cut(self) -> str:
        """A sentence if the default length ended an answer, else nothing."""
        cut = [len(each.token_ids) for each in self.outputs if each.finish_reason == FinishReason.LENGTH]
        if not cut or not self.has_default_length:
            return ""
        return f"the answer was cut at the default length of {max(cut)} tokens; pass SamplingParams(max_tokens=...)"


def completion_of(followed: FollowedAnswer, index: int, scored: bool, decode: Decode | None) -> CompletionOutput:
    """Return an answer as far as it has grown. `scored`: with log-probabilities."""
    answer, has_scores = followed.answer, followed.request.params.logprobs is not None
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=list(answer.tokens),
        finish_reason=None if followed.finish is None else str(followed.finish),
        stop_reason=answer.stop_reason,
        logprobs=scores_of(followed.outputs, decode) if scored else None,
        cumulative_logprob=sum(each.logprob or 0.0 for each in followed.outputs) if has_scores else None,
        cached_tokens=followed.report.cached_tokens,
        error=followed.error,
        digests=digests_of(followed) if followed.request.params.logits_digest else None,
    )


def chunk_of(piece: Piece, scored: bool, result: Result | None, decode: Decode | None) -> Chunk:
    """Return a piece as a chunk of a stream; the last one has the result."""
    return Chunk(
        text=piece.text,
        token_ids=tuple(output.token for output in piece.outputs if output.token is not None),
        logprobs=tuple(scores_of(piece.outputs, decode)) if scored else None,
        finish_reason=None if piece.finish is None else str(piece.finish),
        result=result,
    )


def scores_of(outputs: Iterable[Output], decode: Decode | None) -> list[TokenScore]:
    return [
        TokenScore(output.token, output.logprob, tuple(output.top or ()), decode)
        for output in outputs
        if output.token is not None and output.logprob is not None
    ]


def prompt_scores(followed: FollowedAnswer, decode: Decode | None) -> list[TokenScore | None] | None:
    """Return the scores of a prompt's tokens, if the request has them; None for those that have no score."""
    params, prompt = followed.request.params, followed.request.prompt.tolist()
    if params.prompt_logprobs is None:
        return None
    first = 1 + min(params.prompt_logprobs_start, len(prompt) - 1)
    scores: list[TokenScore | None] = [None] * first
    known = zip(prompt[first:], followed.report.prompt_scores)
    return scores + [TokenScore(token, score.logprob, tuple(score.top), decode) for token, score in known]


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """An answer that beam search found. `tokens` begin with the prompt; `cum_logprob` sums those of the answer."""

    tokens: list[int]
    logprobs: list[TokenScore]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answers to a prompt that beam search found, best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
