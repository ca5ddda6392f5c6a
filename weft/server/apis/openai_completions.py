"""POST /v1/completions: continues a text or token ids. Also for models without a tokenizer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer, Piece
from weft.base.errors import InvalidField
from weft.server.apis.delivery import deliver
from weft.server.apis.openai_shapes import (
    PromptLogprobs,
    TextLogprobs,
    echoed_logprobs,
    finish_word,
    joined,
    prompt_logprobs,
    text_logprobs,
    usage_of,
)
from weft.server.front import AskedPrompt, Front, new_name
from weft.server.generation import Generation
from weft.server.http.sse import TextEvents, event
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.grammars import form_of
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import Count, FormFields, StreamOptions, TokenId, Usage, check_common, sampling_params

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(FormFields, kw_only=True):
    """`prompt` is a string, token ids, or a list of either; with `n`, choices are ordered by prompt."""

    prompt: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str


async def complete(front: Front, request: Request) -> Response:
    completion = prepare(front, *await front.read_prompts(request, COMPLETION))
    body = completion.body
    generation = await front.generate(
        completion.prompts,
        request.state.tenant,
        name=completion.name,
        cache_salt=body.cache_salt,
        priority=body.priority,
        retain=body.retain,
        form=form_of(body, front.limits),
        skip_special=body.skip_special_tokens is not False,
    )
    events = completion.events(generation) if body.stream else None
    return await deliver(front, request, generation, events, lambda: completion.answer(generation))


def prompts_of(builder: PromptBuilder, body: CompletionRequest) -> list[Prompt]:
    """Check a body and take its prompts out of it."""
    builder.check_model(body.model)
    check_common(body, builder.limits, bool(body.stream))
    builder.ban(body)
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    keep = builder.kept_tokens(body.truncate_prompt_tokens, most)
    found = builder.encode(as_prompts(body.prompt), "prompt", keep)
    body.prompt = ""
    return found


COMPLETION = BodyReader("completion", CompletionRequest, prompts_of)


def prepare(front: Front, body: CompletionRequest, prompts: list[Prompt]) -> Completion:
    n = body.n or 1
    # The wider of two requests for scores of the prompt; each response field shows its own part.
    wanted = [count for count in (body.logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
    scored = max(wanted, default=None)
    asked = []
    for prompt in prompts:
        max_tokens = front.max_tokens(body.max_tokens, len(prompt.tokens), default=DEFAULT_MAX_TOKENS)
        params = sampling_params(body, front.limits, max_tokens, body.logprobs, scored, suggested=front.suggested)
        asked.append(AskedPrompt(prompt, params, n, scores_once=not body.stream))
    return Completion(front, body, asked)


def as_prompts(prompt: str | list[str | int | list[int]], field: str = "prompt") -> list[str | list[int]]:
    """
    >>> as_prompts("a"), as_prompts([1, 2]), as_prompts(["a", [1]])
    (['a'], [[1, 2]], ['a', [1]])
    """
    if isinstance(prompt, str):
        return [prompt]
    numbers = [each for each in prompt if isinstance(each, int)]
    if numbers and len(numbers) == len(prompt):
        return [numbers]
    if numbers:
        raise InvalidField(field, "must be a string, a list of token ids, or a list of those, not a mixture")
    return [each for each in prompt if not isinstance(each, int)]


class Completion:
    """Shapes the response to one request."""

    def __init__(self, front: Front, body: CompletionRequest, asked: list[AskedPrompt]) -> None:
        self.front = front
        self.body = body
        self.prompts = asked
        self.name = new_name("cmpl-")
        self.created = int(time.time())
        self.fingerprint = front.fingerprint
        self.with_ids = bool(body.return_token_ids) or front.tokenizer is None

    def answer(self, generation: Generation) -> CompletionAnswer:
        choices = [self._choice(sequence) for sequence in generation.sequences]
        return self._wrap(choices, usage_of(generation.sequences, self.body.n or 1))

    def _choice(self, sequence: FollowedAnswer) -> CompletionChoice:
        assert sequence.finish is not None
        start = 0
        text, logprobs = sequence.answer.text, None
        if self.body.echo:
            prompt = self._prompt_text(sequence)
            text, start = prompt + text, len(prompt)
        if self.body.logprobs is not None:
            begins = sequence.begins(len(sequence.outputs), start)
            logprobs = text_logprobs(self.front.tokenizer, sequence.outputs, begins)
            if self.body.echo:
                logprobs = joined(self._echoed_logprobs(sequence), logprobs)
        return CompletionChoice(
            index=sequence.index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_word(sequence.finish),
            stop_reason=sequence.answer.stop_reason,
            token_ids=sequence.answer.tokens if self.with_ids else msgspec.UNSET,
            prompt_token_ids=sequence.request.prompt.tolist() if self.body.return_token_ids else msgspec.UNSET,
            prompt_logprobs=msgspec.UNSET
            if self.body.prompt_logprobs is None
            else prompt_logprobs(self.front.tokenizer, sequence, self.body.prompt_logprobs),
        )

    def _prompt_text(self, sequence: FollowedAnswer) -> str:
        if self.front.tokenizer is None:
            return ""
        return self.front.tokenizer.decode(sequence.request.prompt.tolist(), skip_special=False)

    def _echoed_logprobs(self, sequence: FollowedAnswer) -> TextLogprobs:
        prompt, scores = sequence.request.prompt.tolist(), sequence.prompt_scores
        return echoed_logprobs(self.front.tokenizer, prompt, scores, self.body.logprobs or 0)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        options = self.body.stream_options or StreamOptions()
        no_usage = None if options.include_usage else msgspec.UNSET
        begun: set[int] = set()
        plain = {} if self._is_detailed else self._text_events(generation, no_usage)
        async for piece in generation:
            if piece.finish is None and plain:
                yield plain[piece.index].event(piece.text)
                continue
            generation.check(piece)
            sequence, first = generation.sequences[piece.index], piece.index not in begun
            if self.body.echo and self.body.logprobs is not None:
                # Scores of the prompt, which come first, are known only at the end.
                if piece.finish is not None:
                    work = partial(self._whole_event, sequence, no_usage)
                    yield await self.front.run_off_loop(generation.size, work)
                continue
            begun.add(piece.index)
            choice = self._piece(sequence, piece)
            if first and self.body.echo:
                prompt = await self.front.run_off_loop(generation.size, partial(self._prompt_text, sequence))
                choice.text = prompt + choice.text
            yield event(self._wrap([choice], no_usage))
        if options.include_usage:
            yield event(self._wrap([], usage_of(generation.sequences, self.body.n or 1)))

    @property
    def _is_detailed(self) -> bool:
        """Return whether events have more than a text."""
        return self.with_ids or bool(self.body.echo) or self.body.logprobs is not None

    def _text_events(self, generation: Generation, usage: msgspec.UnsetType | None) -> dict[int, TextEvents]:
        """Return the events of each answer that neither begin nor end it."""

        def events_of(index: int) -> TextEvents:
            return TextEvents(lambda text: self._wrap([CompletionChoice(index=index, text=text)], usage))

        return {each.index: events_of(each.index) for each in generation.sequences}

    def _whole_event(self, sequence: FollowedAnswer, usage: msgspec.UnsetType | None) -> bytes:
        return event(self._wrap([self._choice(sequence)], usage))

    def _piece(self, sequence: FollowedAnswer, piece: Piece) -> CompletionChoice:
        text, logprobs = piece.text, None
        if self.body.logprobs is not None:
            begins = sequence.begins(len(piece.outputs))
            logprobs = text_logprobs(self.front.tokenizer, piece.outputs, begins)
        return CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=logprobs,
            finish_reason=None if piece.finish is None else finish_word(piece.finish),
            stop_reason=None if piece.finish is None else sequence.answer.stop_reason,
            token_ids=[o.token for o in piece.outputs if o.token is not None] if self.with_ids else msgspec.UNSET,
        )

    def _wrap(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    ) -> CompletionAnswer:
        return CompletionAnswer(
            id=self.name,
            created=self.created,
            model=self.front.model_name,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint,
        )
