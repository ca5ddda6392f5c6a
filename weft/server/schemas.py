"""Bodies that several routes share, as msgspec structs: decoding checks them, and the OpenAPI document derives from
them.

Unknown fields are ignored, as in other servers. A route refuses unsupported fields that would change the answer.
`null` always means the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.base.errors import InvalidField
from weft.base.sampling import MAX_BIASES, MAX_LOGPROBS, SamplingParams
from weft.server.bodies import check_count, check_items
from weft.server.settings import Limits

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
USUAL = SamplingParams()


class CacheFields(msgspec.Struct, kw_only=True):
    """Fields about reuse and scheduling, in every body that generates."""

    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
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
    """Constraints on the answer, at most one: OpenAI's, then vLLM's newer and older names, then SGLang's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    # Supported by other servers and would change the answer: refused rather than ignored.
    allowed_token_ids: Any = None
    bad_words: Any = None
    lora_path: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


UNSERVED: tuple[str, ...] = ("allowed_token_ids", "bad_words", "lora_path", "prompt_embeds", "prompt_logprobs")
UNSERVED += ("truncate_prompt_tokens", "use_beam_search")


def refuse(body: msgspec.Struct, names: Sequence[str]) -> None:
    """Refuse unsupported fields."""
    for name in names:
        if getattr(body, name) not in (None, False, "", [], {}):
            raise InvalidField(name, "is not supported")


class PromptDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`miss` is an extension: why not more of the prompt was cached."""

    cached_tokens: int | None = None
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
) -> SamplingParams:
    """Return a body's fields as the engine's parameters; errors name the field that exceeds a bound.

    `scored` is the body's name for the number of alternatives; `suggested` has the defaults.
    """
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    check_stops(stops, limits)
    check_items("stop_token_ids", fields.stop_token_ids, limits.stops)
    check_items("logit_bias", fields.logit_bias, min(limits.biases, MAX_BIASES))
    if logprobs is not None:
        check_count(scored, logprobs, min(limits.logprobs, MAX_LOGPROBS))
    if (fields.min_tokens or 0) > max_tokens:
        raise InvalidField("min_tokens", f"must not exceed max_tokens {max_tokens}, got {fields.min_tokens}")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        temperature=_or(fields.temperature, suggested.temperature),
        top_k=max(int(_or(fields.top_k, suggested.top_k)), 0),
        top_p=_or(fields.top_p, suggested.top_p),
        min_p=_or(fields.min_p, suggested.min_p),
        repetition_penalty=_or(fields.repetition_penalty, suggested.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=fields.logit_bias or None,
        seed=fields.seed,
        stop=tuple(stops),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=prompt_logprobs_start,
    )


def check_stops(stops: list[str], limits: Limits, field: str = "stop") -> None:
    check_items(field, stops, limits.stops)
    for text in stops:
        if not 0 < len(text) <= limits.stop_characters:
            raise InvalidField(field, f"must be strings of 1 to {limits.stop_characters} characters")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
