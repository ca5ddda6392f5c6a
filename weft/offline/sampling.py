"""What a caller of `LLM` asks for, in vLLM's names; converts to the engine's parameters. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.base.sampling import SamplingParams as EngineParams

MOST_ANSWERS = 256
# `max_tokens=None`: all that fits behind the prompt.
UNBOUNDED = 1 << 24


class DefaultLength(int):
    """The default of `max_tokens`. Its type tells it apart from the same number chosen by a caller."""


DEFAULT_LENGTH = DefaultLength(EngineParams().max_tokens)
# Parameters that the engine has under the same name. `None` means the default for all of them.
OWN = ("max_tokens", "include_stop", "vector_from")
SHARED = tuple(each.name for each in fields(EngineParams) if each.name not in OWN)
DEFAULTS = {name: getattr(EngineParams(), name) for name in SHARED}
# Parameters that only have an effect with values that are not supported: the values that are, and the advice.
FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "spaces_between_special_tokens": ((True,), "the text has these spaces"),
    "logits_processors": ((None, []), "use logit_bias, bad_words, allowed_token_ids or structured_outputs"),
    "extra_args": ((None, {}), "nothing reads them"),
    "skip_reading_prefix_cache": ((None, False), "pass another cache_salt to compute a prompt again"),
    "flat_logprobs": ((None, False), "logprobs are a list with one mapping per token"),
}


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM.generate` has: the whole answer so far, what is new, or one answer at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The form of an answer; exactly one of them.

    `json` is a JSON schema, `choice` a list of texts, `grammar` a grammar in Lark or GBNF. There is one `backend`, so
    any name of one is accepted.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        self.compiled_from()

    def compiled_from(self) -> Grammar:
        """Return the form as the engine compiles it."""
        schema = self.json if isinstance(self.json, str | None) else json.dumps(self.json)
        choices = None if self.choice is None else json.dumps(list(self.choice))
        found = [
            Grammar("json_schema", schema) if schema is not None else None,
            Grammar("regex", self.regex) if self.regex is not None else None,
            Grammar("choice", choices) if choices is not None else None,
            Grammar("lark", self.grammar) if self.grammar is not None else None,
            Grammar("json_object") if self.json_object else None,
        ]
        given = [each for each in found if each is not None]
        if len(given) != 1:
            raise InvalidField("structured_outputs", f"must have exactly one constraint, got {len(given)}")
        return given[0]


@dataclass(kw_only=True)
class GenerationParams:
    """How to sample the answers to a prompt, and when they end.

    `n` answers are returned, the likeliest of `best_of` if that is more. `max_tokens` bounds an answer; None: all that
    the context has room for. temperature 0 is greedy; top_k 0 or -1, top_p 1, min_p 0, repetition_penalty 1 and the
    other penalties 0 are off. A `seed` gives the same text whatever else is in the batch.

    `logprobs=n` returns the log-probability of each sampled token and of the `n` most likely ones (0: only the sampled
    token). `prompt_logprobs` does the same for the prompt, from `prompt_logprobs_start` on. `structured_outputs` is the
    form of the answer (`guided_decoding`: its older name). The answer contains none of the `bad_words`, texts or token
    sequences, and only tokens of `allowed_token_ids` if there are any. `truncate_prompt_tokens` keeps that many tokens
    at the end of the prompt. Without `detokenize`, an answer has no text.

    `logits_digest` returns 64 bits of a hash of the logits with each token: equal digests mean equal logits, to the
    bit. `draft` lowers the number of drafts in a step; 0 turns them off.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = DEFAULT_LENGTH
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] | str | None = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | int | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logits_digest: bool = False
    draft: int | None = None
    spaces_between_special_tokens: bool = True
    logits_processors: Sequence[Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    flat_logprobs: bool | None = None

    def __post_init__(self) -> None:
        _check_count("n", self.n, MOST_ANSWERS)
        if self.best_of is not None:
            _check_count("best_of", self.best_of, MOST_ANSWERS, least=self.n)
        if self.truncate_prompt_tokens is not None:
            _check_count("truncate_prompt_tokens", self.truncate_prompt_tokens, UNBOUNDED)
        for name, (values, advice) in FIXED.items():
            if getattr(self, name) not in values:
                raise InvalidField(name, f"{getattr(self, name)!r:.80} is not supported: {advice}")
        self.for_engine(UNBOUNDED)
        self.form()

    @property
    def answers(self) -> int:
        """The number of answers to compute."""
        return max(self.n, self.best_of or 1)

    @property
    def has_default_length(self) -> bool:
        return isinstance(self.max_tokens, DefaultLength)

    def for_engine(self, room: int) -> EngineParams:
        """Return the engine's parameters for a prompt with room for this many tokens behind it."""
        values = {name: getattr(self, name) for name in SHARED}
        found = {name: DEFAULTS[name] if value is None else value for name, value in values.items()}
        if self.top_k == -1:
            found["top_k"] = 0
        length = self.max_tokens
        if length is None or self.has_default_length:
            length = max(1, self.min_tokens, min(room, UNBOUNDED if length is None else int(length)))
        if self.answers > self.n and found["logprobs"] is None:
            found["logprobs"] = 0
        return EngineParams(**found, max_tokens=length, include_stop=self.include_stop_str_in_output)

    def form(self) -> Grammar | None:
        """Return the form of the answer, if it has one."""
        given = [each for each in (self.structured_outputs, self.guided_decoding) if each is not None]
        if len(given) > 1:
            raise InvalidField("guided_decoding", "and structured_outputs exclude each other; pass only one of them")
        if not given:
            return None
        form = given[0]
        return (StructuredOutputsParams(**form) if isinstance(form, Mapping) else form).compiled_from()

    def clone(self) -> GenerationParams:
        """Return a copy, which may be changed."""
        return replace(self)


@dataclass(kw_only=True)
class BeamSearchParams:
    """How to search: `beam_width` answers are kept in each step. `length_penalty` 1 ranks them by their mean
    log-probability, 0 by their sum. The `temperature` changes no log-probability, so it has no effect."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


def of_engine(params: EngineParams) -> GenerationParams:
    """Return the engine's parameters as a caller's, with the default of `max_tokens`."""
    return GenerationParams(**{name: getattr(params, name) for name in SHARED})


def _check_count(name: str, value: Any, most: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidField(name, f"must be an integer from {least} to {most}, got {value!r}")
