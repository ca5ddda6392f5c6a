"""Bodies that several routes share, as msgspec structs: decoding checks them, and the OpenAPI document derives from
them.

A struct has the fields that its route understands. `fields.py` says what happens to all others. `null` always means the
default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.base.errors import InvalidField
from weft.base.retain import Seconds
from weft.base.sampling import MAX_BIASES, MAX_DRAFTS, MAX_LOGPROBS, SamplingParams
from weft.server.settings import Limits
from weft.server.texts.bodies import check_count, check_items

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
USUAL = SamplingParams()


class CacheFields(msgspec.Struct, kw_only=True):
    """Fields about reuse and scheduling, in every body that generates."""

    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    retain: Seconds | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None


class SamplingFields(CacheFields, kw_only=True):
    """Sampling and stopping; the names are OpenAI's, then vLLM's."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str | list[TokenId]] | None = None
    allowed_token_ids: list[TokenId] | None = None
    draft: bool | Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] | None = None


class PredictedPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class PredictedContent(msgspec.Struct, kw_only=True):
    """OpenAI's `prediction`: the answer that the caller expects, which is faster if it is right."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


def check_ending(opens: bool | None, continues: bool | None) -> None:
    """Check how a conversation's prompt ends: with the opening of the next message, or within the last one."""
    if continues and opens:
        raise InvalidField("continue_final_message", "and add_generation_prompt exclude each other; set only one")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's `response_format`, one of three types."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's names for constraints that OpenAI's API lacks; exactly one of them. `grammar`: Lark or GBNF."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FormFields(SamplingFields, kw_only=True):
    """Fields of chat and completions: what to do with the prompt, and constraints on the answer, at most one.

    The names of constraints are OpenAI's, then vLLM's newer and older ones, then SGLang's and llama.cpp's.
    """

    n: Annotated[int, Meta(ge=1)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None


def check_common(body: FormFields, limits: Limits, streamed: bool) -> None:
    """Check what chat and completions share."""
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidField("best_of", f"must equal n ({n}), got {body.best_of}; ranking answers is not supported")
    if body.prompt_logprobs is not None:
        check_count("prompt_logprobs", body.prompt_logprobs, min(limits.logprobs, MAX_LOGPROBS))
        if streamed:
            raise InvalidField("prompt_logprobs", "must not be set with stream=true: scores come with a whole answer")
    if body.truncate_prompt_tokens == 0:
        raise InvalidField("truncate_prompt_tokens", "must be -1 or at least 1")


class PromptDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Extensions: `miss` is why not more of the prompt was cached, `loaded_tokens` how much came from another tier,
    `disk_tokens` how much of that from disk, and `remote_tokens` from a remote store. `recomputed_tokens` were known to
    the cache, but computed again, because no state was kept where an edit or a fork parts from what is known.
    """

    cached_tokens: int | None = None
    loaded_tokens: int | None = None
    disk_tokens: int | None = None
    remote_tokens: int | None = None
    recomputed_tokens: int | None = None
    miss: dict[str, Any] | None = None


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: dict[str, int] | None = None


def sampling_params(
    fields: SamplingFields,
    limits: Limits,
    max_tokens: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    prompt_logprobs_start: int = 0,
    scored: str = "logprobs",
    suggested: SamplingParams = USUAL,
    before: int = 0,
) -> SamplingParams:
    """Return a body's fields as the engine's parameters; errors name the field that exceeds a bound.

    `scored` is the body's name for the number of alternatives; `suggested` has the defaults. `before` tokens of the
    answer exist, and count as its minimum's.
    """
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    check_stops(stops, limits)
    check_items("stop_token_ids", fields.stop_token_ids, limits.stops)
    check_items("logit_bias", fields.logit_bias, min(limits.biases, MAX_BIASES))
    check_items("allowed_token_ids", fields.allowed_token_ids, limits.allowed_tokens)
    if logprobs is not None:
        check_count(scored, logprobs, min(limits.logprobs, MAX_LOGPROBS))
    if (fields.min_tokens or 0) > max_tokens:
        raise InvalidField("min_tokens", f"must not exceed max_tokens {max_tokens}, got {fields.min_tokens}")
    least = before + fields.min_tokens if fields.min_tokens else 0
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=least,
        temperature=_or(fields.temperature, suggested.temperature),
        top_k=max(int(_or(fields.top_k, suggested.top_k)), 0),
        top_p=_or(fields.top_p, suggested.top_p),
        min_p=_or(fields.min_p, suggested.min_p),
        repetition_penalty=_or(fields.repetition_penalty, suggested.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=fields.logit_bias or None,
        bad_words=tuple(word if isinstance(word, str) else tuple(word) for word in fields.bad_words or ()),
        allowed_token_ids=None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids),
        seed=fields.seed,
        stop=tuple(stops),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=prompt_logprobs_start,
        draft=_most_drafts(fields.draft),
    )


def _most_drafts(asked: bool | int | None) -> int | None:
    """Return a body's bound of drafts: `true` is the server's."""
    if isinstance(asked, bool):
        return None if asked else 0
    return asked


def check_stops(stops: list[str], limits: Limits, field: str = "stop") -> None:
    check_items(field, stops, limits.stops)
    for text in stops:
        if not 0 < len(text) <= limits.stop_characters:
            raise InvalidField(field, f"must be strings of 1 to {limits.stop_characters} characters")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
