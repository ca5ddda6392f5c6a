"""Turns prompts and conversations into requests, and the engine's outputs into results, for `LLM` and `AsyncLLM`."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypedDict, TypeGuard, cast

import msgspec
import numpy as np

from weft.answers.followed import FollowedAnswer, Piece
from weft.answers.requests import ModelBounds, build_request, numbered
from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.base.retain import MOST_SECONDS, Retain
from weft.base.sampling import SamplingParams as EngineParams
from weft.engine.events import Output
from weft.engine.request import Request
from weft.offline.result import Decode, Result, Times, completion_of, prompt_scores
from weft.offline.sampling import GenerationParams, of_engine
from weft.text.bad_words import token_sequences
from weft.text.conversation import render
from weft.text.prompts import Prompt, Tokens, as_list, encode_prompts
from weft.text.template import ChatTemplate, Message, check_messages
from weft.text.tokenizer import Tokenizer

log = logging.getLogger("weft")


class TextPrompt(TypedDict, total=False):
    """A prompt as text. `cache_salt` isolates its cached prefixes."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids. `prompt`, if given, is shown as its text; `cache_salt` isolates its cached prefixes."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


AnyPrompt: TypeAlias = Prompt | TextPrompt | TokensPrompt
AnyParams: TypeAlias = GenerationParams | EngineParams
Params: TypeAlias = AnyParams | Sequence[AnyParams] | None
Conversation: TypeAlias = Sequence[Message]
PROMPT_NAMES = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(slots=True)
class Answering:
    """One answer as it grows, and when its tokens arrived."""

    followed: FollowedAnswer
    first_token_time: float | None = None
    last_token_time: float | None = None
    ended_time: float | None = None

    def take(self, outputs: list[Output]) -> Piece:
        piece = self.followed.take(outputs)
        now = time.time()
        if piece.outputs:
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
        if piece.finish is not None:
            self.ended_time = now
        return piece


@dataclass(frozen=True, slots=True)
class OpenPrompt:
    """One prompt and its answers: the requests that compute them, and how they are shown."""

    id: str
    prompt: str | None
    params: GenerationParams
    answers: list[Answering]
    decode: Decode | None = None
    arrival_time: float = field(default_factory=time.time)

    @property
    def requests(self) -> list[Request]:
        return [each.followed.request for each in self.answers]

    @property
    def ended(self) -> bool:
        return all(each.followed.finish is not None for each in self.answers)

    def result(self) -> Result:
        """Return the answers as far as they have grown; of an ended prompt, the best ones."""
        scored, first = self.params.logprobs is not None, self.answers[0].followed
        shown = [each.followed for each in self.answers]
        if len(shown) > self.params.n and self.ended:
            # Stable: of equally likely answers, the first.
            shown.sort(key=lambda each: -sum(output.logprob or 0.0 for output in each.outputs))
        report = first.report
        return Result(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=first.request.known.tolist(),
            outputs=[completion_of(each, i, scored, self.decode) for i, each in enumerate(shown[: self.params.n])],
            metrics=self._times(report.queued_seconds),
            prompt_logprobs=prompt_scores(first, self.decode),
            cached_tokens=report.cached_tokens,
            loaded_tokens=report.loaded_tokens,
            disk_tokens=report.disk_tokens,
            remote_tokens=report.remote_tokens,
            miss=report.miss,
            preemptions=report.preemptions,
            has_default_length=self.params.has_default_length,
            cache_salt=first.request.salt.decode() or None,
            forked_tokens=len(first.request.known) - len(first.request.prompt),
        )

    def _times(self, queued_seconds: float) -> Times:
        first = [each.first_token_time for each in self.answers if each.first_token_time is not None]
        last = [each.last_token_time for each in self.answers if each.last_token_time is not None]
        ends = [each.ended_time for each in self.answers if each.ended_time is not None]
        return Times(
            self.arrival_time,
            min(first, default=None),
            max(last, default=None),
            max(ends) if self.ended else None,
            queued_seconds,
        )


class SilentRequest(Protocol):
    """What is asked of a prompt besides an answer."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def params(self) -> EngineParams: ...

    @property
    def snapshots(self) -> tuple[int, ...]: ...


class Asking:
    """Everything that turns what callers pass into requests: texts, templates, bounds and defaults of a model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        bounds: ModelBounds,
        suggested: EngineParams,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.bounds = bounds
        self.suggested = suggested
        self._numbers = itertools.count()

    def defaults(self) -> GenerationParams:
        """Return a copy of the model's own sampling parameters, the defaults of every call."""
        return of_engine(self.suggested)

    def prompts(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: Params,
        *,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        snapshots: Sequence[int] | Sequence[Sequence[int]] = (),
        retain: float | None = None,
        request_id: str | None = None,
    ) -> list[OpenPrompt]:
        """Return what is asked with every prompt; raise before any of it runs."""
        listed = [_plain(each) for each in _as_list(prompts)]
        texts = [text for text, _, _ in listed]
        encoded = encode_prompts([prompt for _, prompt, _ in listed], self.tokenizer, self.bounds.vocab_size)
        salts = [cache_salt if salt is None else salt for _, _, salt in listed]
        return self._asked(encoded, texts, params, salts, priority, snapshots, retain, request_id)

    def vectors(self, asked: Sequence[SilentRequest], salt: str | None) -> list[OpenPrompt]:
        """Return requests that the engine ends without an answer."""
        return [self._one(each.tokens, None, each.params, salt, 0, each.snapshots, None, None) for each in asked]

    def conversations(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        opens: bool = True,
        continues: bool = False,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        retain: float | None = None,
        request_id: str | None = None,
    ) -> list[OpenPrompt]:
        """Return what is asked with every conversation."""
        template = self.template
        if chat_template is not None:
            template = ChatTemplate(chat_template, None if self.tokenizer is None else self.tokenizer.specials)
        rendered = [
            render(
                self.tokenizer,
                template,
                each,
                tools=tools,
                variables=variables,
                add_generation_prompt=opens,
                continue_final_message=continues,
            )
            for each in _conversations(messages)
        ]
        encoded = encode_prompts([tokens for tokens, _ in rendered], self.tokenizer, self.bounds.vocab_size)
        assert self.tokenizer is not None, "without a tokenizer, nothing is rendered"
        texts = [self.tokenizer.backend.decode(tokens, skip_special_tokens=False) for tokens, _ in rendered]
        kept = [positions for _, positions in rendered]
        return self._asked(encoded, texts, params, [cache_salt] * len(texts), priority, kept, retain, request_id)

    def forks(
        self, result: Result, at: int | None, n: int | None, params: Params, choice: int, retain: float | None
    ) -> list[OpenPrompt]:
        """Return what is asked to go on with an answer: `n` times, or once for each of the given parameters."""
        if not 0 <= choice < len(result.outputs):
            raise InvalidField("choice", f"must be from 0 to {len(result.outputs) - 1}, got {choice}")
        answer = result.outputs[choice].token_ids
        kept = len(answer) if at is None else at
        if not 0 <= kept <= len(answer):
            raise InvalidField("at", f"must be from 0 to {len(answer)}, the tokens of the answer, got {at}")
        before = len(result.prompt_token_ids) - result.forked_tokens
        prompt = np.array(result.prompt_token_ids[:before], np.int32)
        given = [self.defaults()] if params is None else _per_prompt(params, len(params) if is_list(params) else 1)
        if n is not None and len(given) > 1:
            raise InvalidField("n", "must not be set with a list of parameters")
        answered = np.array([*result.prompt_token_ids[before:], *answer[:kept]], np.int32)
        return [
            self._one(prompt, None, each, result.cache_salt, 0, (), retain, None, answered) for each in given * (n or 1)
        ]

    def saved(self, prompt: AnyPrompt | Result, cache_salt: str | None) -> list[OpenPrompt]:
        """Return what is asked to save a prompt, or a result's prompt and answer: that it is computed."""
        params = EngineParams(max_tokens=0)
        if not isinstance(prompt, Result):
            return self.prompts(prompt, params, cache_salt=cache_salt)
        if cache_salt is not None:
            raise InvalidField("cache_salt", "must not be set: a result is saved with its own")
        return self.forks(prompt, None, 1, params, 0, None)

    def _asked(
        self,
        prompts: list[Tokens],
        texts: Sequence[str | None],
        params: Params,
        salts: Sequence[str | None],
        priority: int | Sequence[int],
        snapshots: Sequence[int] | Sequence[Sequence[int]],
        retain: float | None,
        request_id: str | None,
    ) -> list[OpenPrompt]:
        count = len(prompts)
        each_params = _per_prompt(self.defaults() if params is None else params, count)
        each_snapshots = _snapshots_per_prompt(snapshots, count)
        priorities = _priorities(priority, count)
        each = zip(prompts, texts, each_params, salts, priorities, each_snapshots, strict=True)
        return [
            self._one(prompt, text, own, salt, order, kept, retain, request_id)
            for prompt, text, own, salt, order, kept in each
        ]

    def _one(
        self,
        prompt: Tokens,
        text: str | None,
        given: AnyParams,
        salt: str | None,
        priority: int,
        snapshots: Sequence[int],
        retain: float | None,
        request_id: str | None,
        answered: Tokens | None = None,
    ) -> OpenPrompt:
        if not isinstance(salt, str | None):
            raise InvalidField("cache_salt", f"must be a string, got {salt!r}")
        done = 0 if answered is None else len(answered)
        params, own, grammar = self._params(given, len(prompt) + done)
        kept = params.truncate_prompt_tokens
        first = build_request(
            prompt if kept is None else prompt[-kept:],
            own,
            self.bounds,
            salt=(salt or "").encode(),
            priority=priority,
            snapshots=snapshots,
            grammar=grammar,
            retain=retained(retain),
            answered=answered,
        )
        answers = []
        for place in range(params.answers):
            # The prompt is scored once.
            found = numbered(own if place == 0 else replace(own, prompt_logprobs=None), place)
            request = msgspec.structs.replace(first, params=found)
            answers.append(Answering(FollowedAnswer(request, self._detokenizer(params), place)))
        name = request_id or str(next(self._numbers))
        return OpenPrompt(name, text, params, answers, None if self.tokenizer is None else self._decode)

    def _params(self, given: AnyParams, known: int) -> tuple[GenerationParams, EngineParams, Grammar | None]:
        """Return parameters as the caller's and as the engine's, and the form of the answers."""
        if isinstance(given, EngineParams):
            params, own, grammar = replace(of_engine(given), max_tokens=given.max_tokens), given, None
        else:
            # They may have been changed since they were checked.
            params, grammar = replace(given), given.form()
            length = known if given.truncate_prompt_tokens is None else given.truncate_prompt_tokens
            own = params.for_engine(self.bounds.max_length - length)
        if own.bad_words:
            own = replace(own, bad_words=token_sequences(own.bad_words, self.tokenizer))
        return params, own, grammar

    def _detokenizer(self, params: GenerationParams) -> Any:
        if self.tokenizer is None or not params.detokenize:
            return None
        return self.tokenizer.detokenizer(params.skip_special_tokens)

    def _decode(self, token: int) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode([token], skip_special=False)


def report_cut(results: Sequence[Result]) -> None:
    """Log once for all results that the default length ended an answer."""
    cut = [each.why_cut for each in results if each.why_cut]
    if cut:
        log.warning("%d of %d: %s", len(cut), len(results), cut[0])


def is_list(params: AnyParams | Sequence[AnyParams]) -> TypeGuard[Sequence[AnyParams]]:
    return isinstance(params, Sequence) and not isinstance(params, str)


def retained(seconds: float | None) -> tuple[Retain, ...]:
    """Return what a request retains: its prompt and answer, for these seconds."""
    if seconds is None:
        return ()
    if not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_SECONDS:
        raise InvalidField("retain", f"must be from 0 to {MOST_SECONDS:.0f} seconds, got {seconds!r}")
    return (Retain(float(seconds)),)


def refuse_adapters(lora_request: object) -> None:
    if lora_request is not None:
        raise InvalidField("lora_request", "is not supported: there are no LoRA adapters")


def _as_list(prompts: AnyPrompt | Sequence[AnyPrompt]) -> Sequence[AnyPrompt]:
    return [cast(AnyPrompt, prompts)] if isinstance(prompts, Mapping) else as_list(cast(Prompt, prompts))


def _plain(prompt: AnyPrompt) -> tuple[str | None, Prompt, str | None]:
    """Return a prompt's text, if known, the prompt, and its salt, if it has its own.

    >>> _plain({"prompt_token_ids": [5, 6], "cache_salt": "a"}), _plain("Hello")
    ((None, [5, 6], 'a'), ('Hello', 'Hello', None))
    """
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else None, prompt, None
    given = cast(Mapping[str, Any], prompt)
    unknown = [name for name in given if name not in PROMPT_NAMES and given[name] is not None]
    if unknown:
        raise InvalidField("prompt", f"has {unknown[0]!r}; it may have {', '.join(PROMPT_NAMES)}")
    text, tokens = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and tokens is None:
        raise InvalidField("prompt", "must have prompt or prompt_token_ids")
    return text, tokens if tokens is not None else cast(str, text), given.get("cache_salt")


def _per_prompt(params: AnyParams | Sequence[AnyParams], count: int) -> list[AnyParams]:
    if isinstance(params, AnyParams):
        return [params] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise InvalidField("sampling_params", f"must be SamplingParams or a list of them, got {params!r:.80}")
    if len(params) != count:
        raise InvalidField("sampling_params", f"must have one entry per prompt, got {len(params)} for {count} prompts")
    for place, each in enumerate(params):
        if not isinstance(each, AnyParams):
            raise InvalidField(f"sampling_params[{place}]", f"must be SamplingParams, got {each!r:.80}")
    return list(params)


def _priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    found = [priority or 0] * count if isinstance(priority, int | str | None) else list(priority)
    if len(found) != count:
        raise InvalidField("priority", f"must have one entry per prompt, got {len(found)} for {count} prompts")
    for each in found:
        if not isinstance(each, int) or isinstance(each, bool):
            raise InvalidField("priority", f"must be an integer, got {each!r}")
    return found


def _snapshots_per_prompt(snapshots: Sequence[int] | Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    if all(isinstance(each, int) for each in snapshots):
        return [cast(Sequence[int], snapshots)] * count
    if len(snapshots) != count:
        raise InvalidField("snapshots", f"must have one entry per prompt, got {len(snapshots)} for {count} prompts")
    return list(cast(Sequence[Sequence[int]], snapshots))


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if isinstance(messages, Sequence) and messages and all(isinstance(each, list | tuple) for each in messages):
        return [check_messages(each) for each in cast(Sequence[Conversation], messages)]
    return [check_messages(cast(Conversation, messages))]
