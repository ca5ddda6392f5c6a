"""How a request samples its tokens and when it stops; validated field by field when created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.base.errors import InvalidField

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_BIASES = 1024
# Token sequences; a word given as text counts as two, because it may follow a space.
MAX_BAD_WORDS = 256
# Tokens of all bad words together: every step may compare them.
MAX_BAD_TOKENS = 4096
MAX_BAD_WORD_CHARACTERS = 64
MAX_BAD_WORD_TOKENS = 512
MAX_ALLOWED_TOKENS = 1 << 14
MAX_TOKEN_ID = 1 << 31
# Bound of a request's own bound of drafts; the engine's is lower.
MAX_DRAFTS = 64


def _within(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidField(name, f"must be a number from {low} to {high}, got {value!r}")


def _count(name: str, value: int | None, low: int, high: int, part: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidField(name, f"{part}must be an integer from {low} to {high}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 are off.
    `logprobs=n` returns the log-probability of each sampled token and of the `n` most likely ones (0: only the sampled
    token). `prompt_logprobs` does the same for the prompt, from `prompt_logprobs_start` on. A `seed` gives the same
    text whatever else is in the batch. The answer contains none of the `bad_words`, texts or token sequences, and only
    tokens of `allowed_token_ids` if there are any. `logits_digest` returns 64 bits of a hash of the logits with each
    token: equal digests mean equal logits, to the bit. `draft` lowers the number of drafts in a step; 0 turns them off.
    `vector_from` returns a vector instead of an answer: the mean of the prompt's final hidden states from this position
    on, or what a class head makes of it.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logits_digest: bool = False
    draft: int | None = None
    vector_from: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str | int):
                value = (value,)
            object.__setattr__(self, name, tuple(value))
        _count("max_tokens", self.max_tokens, 0, 1 << 24)
        _count("min_tokens", self.min_tokens, 0, max(self.max_tokens, 0))
        _within("temperature", self.temperature, 0.0, 100.0)
        _count("top_k", self.top_k, 0, 1 << 24)
        _within("top_p", self.top_p, 1e-6, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.draft is not None:
            _count("draft", self.draft, 0, MAX_DRAFTS)
        if self.seed is not None:
            _count("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _count("prompt_logprobs_start", self.prompt_logprobs_start, 0, 1 << 31)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.vector_from is not None:
            _count("vector_from", self.vector_from, 0, 1 << 31)
            if self.max_tokens:
                raise InvalidField("max_tokens", f"must be 0 with vector_from, got {self.max_tokens}")
        if not isinstance(self.logits_digest, bool):
            raise InvalidField("logits_digest", f"must be true or false, got {self.logits_digest!r}")
        self._check_stops()
        self._check_bias()
        self._check_bad_words()
        self._check_allowed()

    @property
    def reads_from(self) -> int | None:
        """The first position of the prompt whose hidden state is read, not only computed; None: that of no position."""
        scores = None if self.prompt_logprobs is None else self.prompt_logprobs_start
        return min((each for each in (scores, self.vector_from) if each is not None), default=None)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidField("stop", f"takes at most {MAX_STOPS} strings, got {len(self.stop)}")
        if any(not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidField("stop", f"must hold strings of 1 to {MAX_STOP_CHARACTERS} characters")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidField("stop_token_ids", f"takes at most {MAX_STOPS} ids, got {len(self.stop_token_ids)}")
        for token in self.stop_token_ids:
            _count("stop_token_ids", token, 0, 1 << 31)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_BIASES:
            raise InvalidField("logit_bias", f"must map at most {MAX_BIASES} token ids to numbers")
        for token, value in self.logit_bias.items():
            _count("logit_bias", token, 0, 1 << 31, part="token id ")
            _within(f"logit_bias[{token}]", value, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_bad_words(self) -> None:
        given = [self.bad_words] if isinstance(self.bad_words, str) else self.bad_words
        words = tuple(word if isinstance(word, str) else _ids("bad_words", word) for word in given)
        if sum(2 if isinstance(word, str) else 1 for word in words) > MAX_BAD_WORDS:
            raise InvalidField(
                "bad_words", f"takes at most {MAX_BAD_WORDS // 2} words or {MAX_BAD_WORDS} token sequences"
            )
        for word in words:
            most = MAX_BAD_WORD_CHARACTERS if isinstance(word, str) else MAX_BAD_WORD_TOKENS
            if not 0 < len(word) <= most or (isinstance(word, str) and not word.strip()):
                raise InvalidField(
                    "bad_words",
                    f"must hold words of 1 to {MAX_BAD_WORD_CHARACTERS} characters, not all of them spaces, or lists "
                    f"of 1 to {MAX_BAD_WORD_TOKENS} token ids",
                )
        total = sum(len(word) for word in words if not isinstance(word, str))
        if total > MAX_BAD_TOKENS:
            raise InvalidField("bad_words", f"has {total} tokens in all; the limit is {MAX_BAD_TOKENS}")
        object.__setattr__(self, "bad_words", words)

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is None:
            return
        ids = _ids("allowed_token_ids", self.allowed_token_ids)
        if not 0 < len(ids) <= MAX_ALLOWED_TOKENS:
            raise InvalidField("allowed_token_ids", f"must have 1 to {MAX_ALLOWED_TOKENS} token ids, got {len(ids)}")
        object.__setattr__(self, "allowed_token_ids", ids)


def _ids(name: str, value: Iterable[int]) -> tuple[int, ...]:
    """Return token ids as a tuple; all of them are checked at once, because there may be thousands."""
    ids = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(map(_is_id, ids)):
        raise InvalidField(name, f"must hold token ids, integers from 0 to {MAX_TOKEN_ID - 1}, got {ids!r:.80}")
    return ids


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKEN_ID
