"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer, Piece
from weft.base.errors import InvalidField
from weft.engine.events import FinishReason, Output
from weft.server.apis.chat_turn import ChatTurn
from weft.server.apis.delivery import deliver
from weft.server.apis.openai_shapes import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    finish_word,
    prompt_logprobs,
    usage_of,
)
from weft.server.apis.split_answer import SplitAnswer
from weft.server.front import Front, new_name
from weft.server.generation import Generation
from weft.server.http.sse import TextEvents, event
from weft.server.settings import Limits
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.grammars import form_of
from weft.server.texts.openai_messages import ChatMessage, Tool, ToolChoice
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import (
    Count,
    FormFields,
    PredictedContent,
    StreamOptions,
    Usage,
    check_common,
    check_ending,
)
from weft.text.answer_parts import AnswerPart, PartKind


class ChatRequest(FormFields, kw_only=True):
    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=16)] | None = None
    include_reasoning: bool | None = None
    return_token_ids: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: PredictedContent | None = None


class ToolCallFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: ToolCallFunction


class ChatAnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


async def chat(front: Front, request: Request) -> Response:
    body, [prompt] = await front.read_prompts(request, CHAT)
    asked = Chat(front, body)
    generation = await asked.start(request, prompt)
    events = asked.events(generation) if body.stream else None
    return await deliver(front, request, generation, events, lambda: asked.answer(generation))


def check_contradictions(body: ChatRequest, limits: Limits) -> None:
    check_common(body, limits, bool(body.stream))
    check_ending(body.add_generation_prompt, body.continue_final_message)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs", "needs logprobs=true")


def prompts_of(builder: PromptBuilder, body: ChatRequest) -> list[Prompt]:
    """Check a body and take its conversation out of it."""
    builder.check_model(body.model)
    check_contradictions(body, builder.limits)
    builder.ban(body)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    found = builder.render_conversation(
        body.messages,
        body.tools,
        body.tool_choice,
        body.chat_template_kwargs,
        body.reasoning_effort,
        opens=body.add_generation_prompt is not False,
        continues=bool(body.continue_final_message),
        keep=builder.kept_tokens(body.truncate_prompt_tokens, most),
    )
    prediction = builder.predict(body.prediction)
    body.messages, body.prediction = [], None
    return [replace(found, prediction=prediction)]


CHAT = BodyReader("chat", ChatRequest, prompts_of)


def turn_of(front: Front, body: ChatRequest) -> ChatTurn:
    return ChatTurn(
        front,
        tools=body.tools,
        choice=body.tool_choice,
        parallel=body.parallel_tool_calls,
        form=form_of(body, front.limits),
        reasoning=body.include_reasoning is not False,
    )


class Chat:
    """Runs one request through the engine and shapes its response."""

    def __init__(self, front: Front, body: ChatRequest) -> None:
        self.front = front
        self.body = body
        self.name = new_name("chatcmpl-")
        self.created = int(time.time())
        self.fingerprint = front.fingerprint
        self.turn = turn_of(front, body)

    async def start(self, request: Request, prompt: Prompt) -> Generation:
        body = self.body
        most = ("max_tokens", body.max_tokens)
        if body.max_completion_tokens is not None:
            most = ("max_completion_tokens", body.max_completion_tokens)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        tenant = request.state.tenant
        return await self.turn.generate(
            prompt,
            body,
            tenant,
            self.name,
            max_tokens=most,
            n=body.n or 1,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )

    # whole response ---------------------------------------------------------------------------------------------------

    def answer(self, generation: Generation) -> ChatAnswer:
        parts = [self.turn.parts() for _ in generation.sequences]
        found = ChatAnswer(
            id=self.name,
            created=self.created,
            model=self.front.model_name,
            choices=[self._choice(*each) for each in zip(generation.sequences, parts)],
            usage=self._usage(generation, parts),
            system_fingerprint=self.fingerprint,
        )
        if self.body.return_token_ids:
            found.prompt_token_ids = generation.sequences[0].request.prompt.tolist()
        if self.body.prompt_logprobs is not None:
            found.prompt_logprobs = prompt_logprobs(
                self.front.tokenizer, generation.sequences[0], self.body.prompt_logprobs
            )
        return found

    def _usage(self, generation: Generation, parts: list[SplitAnswer]) -> Usage:
        thought = sum(self.front.count(each.reasoning) for each in parts)
        return usage_of(generation.sequences, self.body.n or 1, thought or None)

    def _choice(self, sequence: FollowedAnswer, parts: SplitAnswer) -> ChatChoice:
        parts.feed(sequence.answer.text)
        parts.finish()
        return ChatChoice(
            index=sequence.index,
            message=whole_message(parts),
            logprobs=self._logprobs(sequence.outputs),
            finish_reason=end_word(sequence, parts),
            stop_reason=sequence.answer.stop_reason,
            token_ids=sequence.answer.tokens if self.body.return_token_ids else UNSET,
        )

    def _logprobs(self, outputs: list[Output]) -> ChatLogprobs | None:
        return chat_logprobs(self.front.tokenizer, outputs) if self.body.logprobs else None

    # streamed response ------------------------------------------------------------------------------------------------

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        options = self.body.stream_options or StreamOptions()
        no_usage = None if options.include_usage else UNSET
        parts = [self.turn.parts() for _ in generation.sequences]
        for sequence in generation.sequences:
            opening = ChatChunkChoice(index=sequence.index, delta=ChatDelta(role="assistant", content=""))
            yield event(self._chunk([opening], no_usage))
        is_detailed = self.body.logprobs or self.body.return_token_ids
        plain = {} if is_detailed else self._text_events(generation, no_usage)
        async for piece in generation:
            if piece.finish is None and plain:
                for part in parts[piece.index].feed(piece.text):
                    known = plain.get((piece.index, part.kind))
                    yield known.event(part.text) if known else self._part_event(piece.index, part, no_usage)
                continue
            generation.check(piece)
            for choice in self._pieces(generation.sequences[piece.index], piece, parts[piece.index]):
                yield event(self._chunk([choice], no_usage))
        if options.include_usage:
            usage = await self.front.run_off_loop(generation.size, lambda: self._usage(generation, parts))
            yield event(self._chunk([], usage))

    def _text_events(
        self, generation: Generation, usage: Usage | UnsetType | None
    ) -> dict[tuple[int, str], TextEvents]:
        """Return the events of content and of reasoning for each answer."""

        def events_of(index: int, kind: PartKind) -> TextEvents:
            return TextEvents(
                lambda text: self._chunk([ChatChunkChoice(index=index, delta=delta_of(AnswerPart(kind, text)))], usage)
            )

        kinds: tuple[PartKind, ...] = ("content", "reasoning")
        return {(each.index, kind): events_of(each.index, kind) for each in generation.sequences for kind in kinds}

    def _part_event(self, index: int, part: AnswerPart, usage: Usage | UnsetType | None) -> bytes:
        return event(self._chunk([ChatChunkChoice(index=index, delta=delta_of(part))], usage))

    def _pieces(self, sequence: FollowedAnswer, piece: Piece, parts: SplitAnswer) -> list[ChatChunkChoice]:
        """Return a piece as chunks, one per part of the answer; the first has scores and ids, the last the finish."""
        found = parts.feed(piece.text)
        if piece.finish is not None:
            found = found + parts.finish()
        deltas = [delta_of(part) for part in found]
        if not deltas and (piece.finish is not None or self.body.logprobs or self.body.return_token_ids):
            deltas = [ChatDelta()]
        choices = [ChatChunkChoice(index=piece.index, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs = self._logprobs(piece.outputs)
            if self.body.return_token_ids:
                choices[0].token_ids = [output.token for output in piece.outputs if output.token is not None]
        if piece.finish is not None:
            choices[-1].finish_reason = end_word(sequence, parts)
            choices[-1].stop_reason = sequence.answer.stop_reason
        return choices

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self.name,
            created=self.created,
            model=self.front.model_name,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint,
        )


def end_word(sequence: FollowedAnswer, parts: SplitAnswer) -> str:
    """Return the finish reason; a call that the client's stop string cut short does not count as made."""
    assert sequence.finish is not None
    made = parts.calls and not (sequence.cut and parts.broken_off)
    return "tool_calls" if made and sequence.finish is FinishReason.STOP else finish_word(sequence.finish)


def whole_message(parts: SplitAnswer) -> ChatAnswerMessage:
    message = ChatAnswerMessage(content=None if parts.calls and not parts.content else parts.content)
    if parts.reasoning:
        message.reasoning_content = parts.reasoning
    if parts.calls:
        message.tool_calls = [
            ToolCallDelta(
                id=call.id, type="function", function=ToolCallFunction(name=call.name, arguments=call.arguments)
            )
            for call in parts.calls
        ]
    return message


def delta_of(part: AnswerPart) -> ChatDelta:
    if part.kind == "content":
        return ChatDelta(content=part.text)
    if part.kind == "reasoning":
        return ChatDelta(reasoning_content=part.text)
    function = ToolCallFunction(name=part.name, arguments=part.text)
    call = ToolCallDelta(index=part.call, id=part.id, type="function" if part.name else None, function=function)
    return ChatDelta(tool_calls=[call])
