"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer
from weft.base.errors import InvalidField
from weft.base.grid import CELL
from weft.engine.events import FinishReason
from weft.server.apis.anthropic_events import Blocks
from weft.server.apis.anthropic_messages import (
    CountRequest,
    MessagesRequest,
    check_unsupported,
    choice_of,
    is_prefilled,
    messages_of,
    tools_of,
    variables_of,
)
from weft.server.apis.chat_turn import ChatTurn
from weft.server.apis.delivery import deliver
from weft.server.apis.tokens import answered
from weft.server.front import Front, new_name
from weft.server.generation import Generation
from weft.server.http.errors import anthropic_error
from weft.server.http.sse import named_event
from weft.server.texts.bodies import check_count, decode
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.fields import check_fields
from weft.server.texts.grammars import Form, from_schema
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import SamplingFields, check_stops

PING = named_event("ping", {"type": "ping"})


class MessageAnswerBody(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class CountAnswer(msgspec.Struct, kw_only=True):
    input_tokens: int


async def messages(front: Front, request: Request) -> Response:
    body, [prompt] = await front.read_prompts(request, MESSAGE)
    answer = MessageAnswer(front, body, prompt)
    generation = await answer.start(request)
    events = answer.events(generation) if body.stream else None
    return await deliver(
        front,
        request,
        generation,
        events,
        lambda: answer.whole(generation.sequences[0]),
        failed=failed,
        done=b"",
        keep_alive=PING,
    )


async def count_tokens(front: Front, request: Request) -> Response:
    return await answered(front, request, "count_tokens", counted)


def failed(error: Exception) -> bytes:
    return named_event("error", anthropic_error(error)[1])


def rendered(builder: PromptBuilder, body: CountRequest) -> Prompt:
    """Check a body and return its conversation as a prompt."""
    builder.check_model(body.model)
    check_unsupported(body)
    found = messages_of(body, builder.limits)
    effort = body.output_config.effort if body.output_config else None
    try:
        prompt = builder.render_conversation(
            found.messages,
            tools_of(body),
            choice_of(body),
            variables_of(body),
            effort,
            continues=is_prefilled(body),
            places=found.places,
        )
    except InvalidField as error:
        # This API has no such field: a last message of the assistant implies it.
        if error.field != "continue_final_message":
            raise
        raise InvalidField(found.places[-1], "cannot be continued: it must be text that the template writes") from error
    builder.check_tokens(len(prompt.tokens), "messages")
    return prompt


def counted(builder: PromptBuilder, data: bytes) -> bytes:
    """Return the response to a body of /v1/messages/count_tokens."""
    body = decode(data, CountRequest, builder.limits)
    check_fields(data, MESSAGE.name, MessagesRequest, {}, builder.strict_fields)
    prompt = rendered(builder, body)
    return msgspec.json.encode(CountAnswer(input_tokens=len(prompt.tokens)))


def prompts_of(builder: PromptBuilder, body: MessagesRequest) -> list[Prompt]:
    """Check a body and take its conversation out of it."""
    found = rendered(builder, body)
    body.messages, body.system = [], None
    return [found]


MESSAGE = BodyReader("message", MessagesRequest, prompts_of)


def turn_of(front: Front, body: MessagesRequest) -> ChatTurn:
    alone = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    return ChatTurn(
        front, tools=tools_of(body), choice=choice_of(body), parallel=not alone, form=format_of(body, front)
    )


def format_of(body: MessagesRequest, front: Front) -> Form | None:
    wanted = body.output_config.format if body.output_config else None
    return None if wanted is None else from_schema("output_config.format.schema", wanted.schema, front.limits)


class MessageAnswer:
    """Runs one request through the engine and shapes its response."""

    def __init__(self, front: Front, body: MessagesRequest, prompt: Prompt) -> None:
        self.front = front
        self.body = body
        self.prompt = prompt
        self.name = new_name("msg_")
        self.turn = turn_of(front, body)
        # Unlike the other APIs, this one ends an answer where the context ends.
        check_count("max_tokens", body.max_tokens, front.limits.max_tokens, 1)
        self.max_tokens = max(1, min(body.max_tokens, front.room - len(prompt.tokens)))

    async def start(self, request: Request) -> Generation:
        body = self.body
        check_stops(body.stop_sequences or [], self.front.limits, "stop_sequences")
        fields = SamplingFields(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences,
            cache_salt=body.cache_salt,
            priority=body.priority,
            retain=body.retain,
        )
        most = ("max_tokens", self.max_tokens)
        return await self.turn.generate(self.prompt, fields, request.state.tenant, self.name, max_tokens=most)

    def _blocks(self) -> Blocks:
        thinking = self.body.thinking
        return Blocks(thinking is None or thinking.display != "omitted")

    # whole response ---------------------------------------------------------------------------------------------------

    def whole(self, sequence: FollowedAnswer) -> MessageAnswerBody:
        parts, blocks = self.turn.parts(), self._blocks()
        blocks.take(parts.feed(sequence.answer.text) + parts.finish())
        blocks.end()
        return self._message(blocks.content, self._usage(sequence, parts.reasoning), *self._stop(sequence, blocks))

    def _message(
        self, content: list[dict[str, Any]], usage: dict[str, Any], reason: str | None = None, stop: str | None = None
    ) -> MessageAnswerBody:
        model = self.front.model_name
        return MessageAnswerBody(
            id=self.name, model=model, content=content, stop_reason=reason, stop_sequence=stop, usage=usage
        )

    def _stop(self, sequence: FollowedAnswer, blocks: Blocks) -> tuple[str, str | None]:
        """Return why the answer ended, and the stop sequence that did it."""
        if isinstance(sequence.answer.stop_reason, str):
            return "stop_sequence", sequence.answer.stop_reason
        if sequence.finish is FinishReason.LENGTH:
            return "max_tokens" if self.max_tokens == self.body.max_tokens else "model_context_window_exceeded", None
        if sequence.finish is FinishReason.STOP:
            return "tool_use" if blocks.called else "end_turn", None
        return str(sequence.finish), None

    def _usage(self, sequence: FollowedAnswer, thought: str) -> dict[str, Any]:
        """Return the usage. Of what was not cached, the part before the last breakpoint on the grid was written."""
        prompt, cached = len(self.prompt.tokens), sequence.report.cached_tokens
        written = max(0, max(self.prompt.snapshots, default=0) // CELL * CELL - cached)
        return {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "output_tokens": sequence.generated,
            "output_tokens_details": {"thinking_tokens": self.front.count(thought)},
        }

    # streamed response ------------------------------------------------------------------------------------------------

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        parts, blocks, sequence = self.turn.parts(), self._blocks(), generation.sequences[0]
        # What was cached is known at the end; `message_delta` repeats the usage.
        usage = {"input_tokens": len(self.prompt.tokens), "output_tokens": 0}
        yield _event("message_start", message=self._message([], usage))
        async for piece in generation:
            generation.check(piece)
            for each in blocks.take(parts.feed(piece.text)):
                yield named_event(*each)
        for each in [*blocks.take(parts.finish()), *blocks.end()]:
            yield named_event(*each)
        reason, stop = self._stop(sequence, blocks)
        thought = parts.reasoning
        final = await self.front.run_off_loop(len(thought), lambda: self._usage(sequence, thought))
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=final)
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
