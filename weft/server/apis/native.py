"""POST /generate: the native API of SGLang's clients and test kits. Texts or token ids, one or many."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer, digests_of
from weft.base.errors import InvalidField
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason, Top
from weft.server.apis.delivery import deliver
from weft.server.apis.openai_shapes import miss_of, token_text
from weft.server.front import AskedPrompt, Front, new_name
from weft.server.generation import Generation
from weft.server.http.sse import event
from weft.server.settings import Limits
from weft.server.texts.bodies import check_count
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.grammars import Form, from_grammar, from_json, from_regex, only
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import CacheFields, Count, Penalty, SamplingFields, Seed, TokenId, sampling_params

DEFAULT_MAX_TOKENS = 128
Start = Annotated[int, Meta(ge=-1, le=1 << 31)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class NativeSampling(msgspec.Struct, kw_only=True):
    """SGLang's names. `max_new_tokens` may be 0: the prompt is only computed, and scored if requested."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    sampling_seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    def common(self) -> SamplingFields:
        """Return the same parameters under the names of the other routes."""
        same = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        same += ["logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"]
        # SGLang's "all tokens" is any number beyond the vocabulary.
        top_k = None if self.top_k is None else min(self.top_k, 1 << 24)
        return SamplingFields(
            **{name: getattr(self, name) for name in same},
            top_k=top_k,
            seed=self.sampling_seed,
            min_tokens=self.min_new_tokens,
            include_stop_str_in_output=self.no_stop_trim,
        )


class GenerateRequest(CacheFields, kw_only=True):
    """`text` or `input_ids`, each one or a list. Fields of a prompt may be one value or a list of them."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: Name | list[Name] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    top_logprobs_num: Count | list[Count] | None = None
    return_text_in_logprobs: bool | None = None
    logits_digest: bool | None = None
    extra_key: Annotated[str, Meta(max_length=256)] | None = None


# Names of the fields of `sampling_params` in other APIs.
NATIVE_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class GenerateAnswer(msgspec.Struct, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | msgspec.UnsetType = msgspec.UNSET


class Scoring(msgspec.Struct, frozen=True):
    """The log-probabilities to report for one prompt: from `start` on in the prompt, with `top` alternatives."""

    start: int
    top: int


async def generate(front: Front, request: Request) -> Response:
    body, prompts = await front.read_prompts(request, GENERATE)
    native = Native.prepare(front, body, prompts)
    generation = await native.start(request)
    events = native.events(generation) if body.stream else None
    return await deliver(front, request, generation, events, lambda: native.whole(generation))


class Native:
    """Runs one request through the engine and shapes its answers."""

    def __init__(self, front: Front, body: GenerateRequest, many: bool) -> None:
        self.front = front
        self.body = body
        self.many = many
        self.began = time.perf_counter()
        self.names: list[str] = []  # by sequence
        self.scorings: list[Scoring | None] = []  # by sequence
        self.prompts: list[AskedPrompt] = []
        self.form: Form | None = None
        self.skip_special = True

    @classmethod
    def prepare(cls, front: Front, body: GenerateRequest, prompts: list[Prompt]) -> Native:
        count = len(prompts)
        samplings = spread("sampling_params", body.sampling_params, count, NativeSampling())
        natives = cls(front, body, is_list(body) or any((each.n or 1) > 1 for each in samplings))
        scored = spread("return_logprob", body.return_logprob, count, False)
        starts = spread("logprob_start_len", body.logprob_start_len, count, -1)
        tops = spread("top_logprobs_num", body.top_logprobs_num, count, 0)
        names = natives.request_names(count)
        for prompt, sampling, wanted, start, top, name in zip(prompts, samplings, scored, starts, tops, names):
            scoring = scoring_of(len(prompt.tokens), start, top) if wanted else None
            natives.add(prompt, sampling, scoring, name)
        natives.take_form(samplings)
        return natives

    def request_names(self, count: int) -> list[str]:
        rid = self.body.rid
        if rid is None:
            return [new_name("") for _ in range(count)]
        if isinstance(rid, str):
            return [rid] if count == 1 else [f"{rid}_{place}" for place in range(count)]
        if len(rid) != count:
            raise InvalidField("rid", f"must have one entry per prompt, got {len(rid)} for {count} prompts")
        return list(rid)

    def add(self, prompt: Prompt, sampling: NativeSampling, scoring: Scoring | None, name: str) -> None:
        n = sampling.n or 1
        check_count("sampling_params.n", n, self.front.limits.n, 1)
        params = self.params_of(sampling, len(prompt.tokens), scoring)
        self.prompts.append(AskedPrompt(prompt, params, n, "input_ids" if self.body.text is None else "text"))
        self.names += [name] if n == 1 else [f"{name}_{place}" for place in range(n)]
        self.scorings += [scoring] * n

    def params_of(self, sampling: NativeSampling, length: int, scoring: Scoring | None) -> SamplingParams:
        most = "sampling_params.max_new_tokens"
        max_tokens = self.front.max_tokens(sampling.max_new_tokens, length, most, DEFAULT_MAX_TOKENS)
        top, start = (None, 0) if scoring is None else (scoring.top, scoring.start)
        prompt_top = None if start >= length - 1 else top
        try:
            params = sampling_params(
                sampling.common(),
                self.front.limits,
                max_tokens,
                top,
                prompt_top,
                start,
                "top_logprobs_num",
                self.front.suggested,
            )
            return replace(params, logits_digest=True) if self.body.logits_digest else params
        except InvalidField as error:
            if error.field is None or error.field == "top_logprobs_num":
                raise
            name = NATIVE_NAMES.get(error.field, error.field)
            raise InvalidField(f"sampling_params.{name}", error.complaint) from None

    def take_form(self, samplings: list[NativeSampling]) -> None:
        """Set the grammar and the treatment of special tokens, which apply to the whole body."""
        forms = [form_of_native(each, self.front.limits) for each in samplings]
        shown = [each.skip_special_tokens is not False for each in samplings]
        if any(form != forms[0] for form in forms) or any(each != shown[0] for each in shown):
            raise InvalidField("sampling_params", "must share one grammar and one skip_special_tokens for all prompts")
        self.form, self.skip_special = forms[0], shown[0]

    async def start(self, request: Request) -> Generation:
        rid = self.body.rid
        return await self.front.generate(
            self.prompts,
            request.state.tenant,
            name=rid if isinstance(rid, str) else self.names[0],
            aliases=tuple(self.names),
            cache_salt=self.body.cache_salt if self.body.extra_key is None else self.body.extra_key,
            priority=self.body.priority,
            retain=self.body.retain,
            form=self.form,
            skip_special=self.skip_special,
        )

    # responses --------------------------------------------------------------------------------------------------------

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield events; in this API, each event contains the whole answer so far."""
        async for piece in generation:
            generation.check(piece)
            found = self.answer(generation.sequences[piece.index])
            if self.many:
                found.index = piece.index
            yield event(found)

    def whole(self, generation: Generation) -> GenerateAnswer | list[GenerateAnswer]:
        answers = [self.answer(sequence) for sequence in generation.sequences]
        return answers if self.many else answers[0]

    def answer(self, sequence: FollowedAnswer) -> GenerateAnswer:
        report, scoring = sequence.report, self.scorings[sequence.index]
        meta: dict[str, Any] = {
            "id": self.names[sequence.index],
            "finish_reason": finish_of(sequence),
            "prompt_tokens": len(sequence.request.prompt),
            "completion_tokens": sequence.generated,
            "cached_tokens": report.cached_tokens,
            "miss": miss_of(report),
            "preemptions": report.preemptions,
            "e2e_latency": time.perf_counter() - self.began,
        }
        if scoring is not None:
            meta |= self._scores(sequence, scoring)
        if sequence.request.params.logits_digest:
            meta["logits_digests"] = digests_of(sequence)
        return GenerateAnswer(text=sequence.answer.text, output_ids=sequence.answer.tokens, meta_info=meta)

    def _scores(self, sequence: FollowedAnswer, scoring: Scoring) -> dict[str, Any]:
        prompt, scores = sequence.request.prompt.tolist(), sequence.report.prompt_scores
        outputs = [output for output in sequence.outputs if output.logprob is not None]
        # The first reported token has no probability, as in SGLang.
        known = list(zip(prompt[scoring.start + 1 :], scores))
        found: dict[str, Any] = {
            "input_token_logprobs": [
                self._entry(None, prompt[scoring.start]),
                *(self._entry(score.logprob, token) for token, score in known),
            ],
            "output_token_logprobs": [self._entry(output.logprob, output.token or 0) for output in outputs],
        }
        if scoring.top:
            found["input_top_logprobs"] = [None, *(self._top(score.top) for _, score in known)]
            found["output_top_logprobs"] = [self._top(output.top or []) for output in outputs]
        return found

    def _top(self, top: Top) -> list[tuple[float | None, int, str | None]]:
        return [self._entry(logprob, token) for token, logprob in top]

    def _entry(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        text = token_text(self.front.tokenizer, token) if self.body.return_text_in_logprobs else None
        return logprob, token, text


def prompts_of(builder: PromptBuilder, body: GenerateRequest) -> list[Prompt]:
    """Check a body and take its prompts out of it; the rest still shows whether they were a list."""
    found = builder.encode(sent_prompts(body), "input_ids" if body.text is None else "text")
    if body.text is not None:
        body.text = [] if is_list(body) else ""
    else:
        body.input_ids = [[]] if is_list(body) else []
    return found


def sent_prompts(body: GenerateRequest) -> list[str | list[int]]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidField("text", "or input_ids must be given, but not both")
    if body.text is not None:
        return [body.text] if isinstance(body.text, str) else list(body.text)
    ids = body.input_ids or []
    lists = [each for each in ids if isinstance(each, list)]
    if lists and len(lists) != len(ids):
        raise InvalidField("input_ids", "must be a list of token ids or a list of such lists, not a mixture")
    return list(lists) if lists else [[each for each in ids if isinstance(each, int)]]


def is_list(body: GenerateRequest) -> bool:
    """Return whether a body has a list of prompts, so that the response is a list."""
    return isinstance(body.text, list) or (body.text is None and isinstance((body.input_ids or [0])[0], list))


GENERATE = BodyReader("generate", GenerateRequest, prompts_of, parts={"sampling_params": NativeSampling})


def spread(name: str, value: Any, count: int, default: Any) -> list[Any]:
    """Return one value for each prompt."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidField(name, f"must have one entry per prompt, got {len(value)} for {count} prompts")
    return value


def scoring_of(prompt: int, start: int, top: int) -> Scoring:
    if start >= prompt:
        raise InvalidField("logprob_start_len", f"must be less than the prompt's length {prompt}, got {start}")
    return Scoring(prompt - 1 if start < 0 else start, top)


def form_of_native(sampling: NativeSampling, limits: Limits) -> Form | None:
    return only(
        [
            from_json("sampling_params.json_schema", sampling.json_schema, limits),
            from_regex("sampling_params.regex", sampling.regex, limits),
            from_grammar("sampling_params.ebnf", sampling.ebnf, limits),
        ]
    )


def finish_of(sequence: FollowedAnswer) -> dict[str, Any] | None:
    """Return the finish reason as an object."""
    match sequence.finish:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": sequence.generated}
        case FinishReason.STOP:
            matched = sequence.answer.stop_reason
            if (
                matched is None
                and sequence.answer.tokens
                and sequence.answer.tokens[-1] in sequence.request.stop_tokens
            ):
                matched = sequence.answer.tokens[-1]
            return {"type": "stop", "matched": matched}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "the request was aborted"}
        case FinishReason.ERROR:
            return {"type": "error", "message": sequence.error}
