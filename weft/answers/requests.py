"""Builds requests to the engine, for HTTP and for `LLM`. Everything that a caller sent is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from weft.base.errors import InvalidField, RequestError
from weft.base.grammar import Grammar
from weft.base.retain import Retain
from weft.base.sampling import SamplingParams
from weft.engine.request import Request, check_token_ids
from weft.text.prompts import NO_TOKENIZER, Tokens, check_snapshots, ends_of_messages

NO_TEXT = "this model generates no text, because it has no head over a vocabulary; /v1/models says what it can do"


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Limits of a model that requests must respect. `has_text`: the model has a tokenizer.

    `only_vectors`: it has no head over the vocabulary.
    """

    vocab_size: int
    max_length: int
    end_tokens: frozenset[int]
    has_text: bool
    only_vectors: bool = False


def build_request(
    prompt: Tokens,
    params: SamplingParams,
    model: ModelBounds,
    *,
    salt: bytes = b"",
    priority: int = 0,
    snapshots: Sequence[int] = (),
    grammar: Grammar | None = None,
    field: str = "prompt",
    prediction: Tokens | None = None,
    retain: tuple[Retain, ...] = (),
    answered: Tokens | None = None,
    keeps_answer: bool = False,
) -> Request:
    """Return a request that the engine accepts; raise `InvalidField` otherwise. `field` names the prompt in errors."""
    done = 0 if answered is None else len(answered)
    if model.only_vectors and (params.max_tokens or params.prompt_logprobs is not None):
        raise RequestError(NO_TEXT)
    check_length(len(prompt) + done, params.max_tokens, model.max_length, field)
    if params.stop and not model.has_text:
        raise InvalidField("stop", f"takes strings, but {NO_TOKENIZER.partition(':')[0]}; use stop_token_ids")
    check_token_ids(params, model.vocab_size)
    if params.allowed_token_ids is not None and grammar is not None:
        raise InvalidField("allowed_token_ids", "and a grammar exclude each other; let the grammar allow these tokens")
    assert not any(isinstance(word, str) for word in params.bad_words), "bad words must be token sequences by now"
    ends = frozenset() if params.ignore_eos else model.end_tokens
    return Request(
        prompt,
        params,
        stop_tokens=frozenset(params.stop_token_ids) | ends,
        salt=salt,
        priority=priority,
        snapshots=check_snapshots(snapshots, len(prompt)),
        grammar=grammar,
        boundaries=ends_of_messages(prompt, model.end_tokens),
        # Nothing beyond the answer's end can be a draft.
        prediction=None if prediction is None else prediction[: params.max_tokens],
        retain=retain,
        answered=answered,
        keeps_answer=keeps_answer,
    )


def check_length(prompt: int, max_tokens: int, max_length: int, field: str) -> None:
    """Check that a prompt and its answer fit the context. The error names the prompt only if it is too long by itself.

    >>> check_length(90, 11, 100, "prompt")
    Traceback (most recent call last):
    weft.base.errors.InvalidField: max_tokens does not fit: prompt has 90 tokens; with max_tokens=11 it exceeds the \
context of 100
    """
    if prompt + max_tokens > max_length:
        raise InvalidField(
            field if prompt >= max_length else "max_tokens",
            f"does not fit: prompt has {prompt} tokens; with max_tokens={max_tokens} it exceeds the context of "
            f"{max_length}",
            code="context_length_exceeded",
        )


def numbered(params: SamplingParams, place: int) -> SamplingParams:
    """Return the parameters of a prompt's n-th answer."""
    if params.seed is None or not place:
        return params
    return replace(params, seed=derived_seed(params.seed, place))


def derived_seed(seed: int, place: int) -> int:
    """Return the seed of the n-th answer; the first keeps the request's own.

    >>> derived_seed(7, 1) == derived_seed(7, 1) != derived_seed(7, 2)
    True
    """
    return int.from_bytes(sha256(f"{seed}/{place}".encode()).digest()[:8], "big", signed=True)
