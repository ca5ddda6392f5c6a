"""POST /v1/responses: OpenAI's newer API. Stored responses are in `stored_responses.py`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer
from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.engine.events import FinishReason
from weft.server.access.auth import Tenant
from weft.server.apis import stored_responses
from weft.server.apis.chat_turn import ChatTurn
from weft.server.apis.delivery import deliver
from weft.server.apis.openai_shapes import chat_logprobs, miss_of
from weft.server.apis.responses_events import Events
from weft.server.apis.split_answer import SplitAnswer
from weft.server.front import Front, new_name
from weft.server.generation import Generation
from weft.server.http.errors import describe
from weft.server.http.sse import named_event
from weft.server.settings import Limits
from weft.server.stored.answers import StoredAnswer
from weft.server.texts.bodies import check_text_depth
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.grammars import Form, from_schema
from weft.server.texts.openai_messages import (
    CalledFunction,
    CalledTool,
    ChatMessage,
    ContentPart,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolFunction,
)
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import Count, SamplingFields

LOGPROBS = "message.output_text.logprobs"
INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORT: "aborted"}


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a tool call, its output, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Annotated[str, Meta(min_length=1, max_length=32)] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    effort: Annotated[str, Meta(max_length=16)] | None = None
    summary: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    user: str | None = None


async def respond(front: Front, request: Request) -> Response:
    sent, tenant = await front.receiving.read_body(request), request.state.tenant
    data, before = await front.run_off_loop(len(sent), lambda: stored_responses.continued(front, sent, tenant))
    body, [prompt] = await front.read_texts(request, RESPONSE, data)
    stores = front.stored is not None and body.store is not False
    # Now, so that nothing is computed for an answer that cannot be stored.
    items = await front.run_off_loop(len(sent), lambda: stored_responses.own_items(sent)) if stores else b""
    answer = ResponseAnswer(front, body, ConversationBefore(front, tenant, stores, items, before))
    generation = await answer.start(request, prompt)
    events = answer.events(generation) if body.stream else None
    return await deliver(
        front,
        request,
        generation,
        events,
        lambda: answer.whole(generation.sequences[0]),
        failed=answer.failed,
        done=b"",
    )


def messages_of(body: ResponsesRequest, limits: Limits) -> tuple[list[ChatMessage], list[str]]:
    """Return the conversation as messages of the chat API, and the place of each in the body.

    Consecutive calls become one message.
    """
    found: list[ChatMessage] = []
    places: list[str] = []
    if body.instructions:
        found.append(ChatMessage(role="system", content=body.instructions))
        places.append("instructions")
    if isinstance(body.input, str):
        return [*found, ChatMessage(role="user", content=body.input)], [*places, "input"]
    for place, item in enumerate(body.input):
        where = f"input[{place}]"
        match item.type:
            case "message":
                if item.role is None or item.content is None:
                    raise InvalidField(where, "is a message and must have role and content")
                found.append(ChatMessage(role=item.role, content=item.content))
            case "function_call":
                _add_call(found, item, where, limits)
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise InvalidField(where, "is an output and must have call_id and output")
                found.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
            case "reasoning":
                pass  # earlier reasoning is not shown to the model again
        places += [where] * (len(found) - len(places))
    return found, places


def _add_call(found: list[ChatMessage], item: InputItem, where: str, limits: Limits) -> None:
    if item.name is None or item.call_id is None:
        raise InvalidField(where, "is a call and must have call_id and name")
    # Checked here, under the field's own name: a call may become part of the previous message.
    check_text_depth(f"{where}.arguments", item.arguments or "", limits.json_depth)
    call = CalledTool(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments or "{}"))
    if found and found[-1].role == "assistant":
        if found[-1].tool_calls is None:
            found[-1].tool_calls = []
        found[-1].tool_calls.append(call)
    else:
        found.append(ChatMessage(role="assistant", tool_calls=[call]))


def format_of(body: ResponsesRequest, front: Front) -> Form | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Form(Grammar("json_object"), "text.format")
    if wanted.schema is None:
        raise InvalidField("text.format.schema", "must be given")
    return from_schema("text.format.schema", wanted.schema, front.limits)


def prompts_of(builder: PromptBuilder, body: ResponsesRequest) -> list[Prompt]:
    """Check a body and take its conversation out of it, except the instructions, which the response repeats."""
    builder.check_model(body.model)
    if body.truncation == "auto":
        raise InvalidField("truncation", 'must be "disabled"')
    builder.ban(body)
    messages, places = messages_of(body, builder.limits)
    effort = body.reasoning.effort if body.reasoning else None
    variables, tools, choice = body.chat_template_kwargs, tools_of(body), choice_of(body)
    found = builder.render_conversation(messages, tools, choice, variables, effort, field="input", places=places)
    body.input = ""
    return [found]


RESPONSE = BodyReader("response", ResponsesRequest, prompts_of, ("instructions",))


def turn_of(front: Front, body: ResponsesRequest) -> ChatTurn:
    return ChatTurn(
        front,
        field="input",
        tools=tools_of(body),
        choice=choice_of(body),
        parallel=body.parallel_tool_calls,
        form=format_of(body, front),
    )


def choice_of(body: ResponsesRequest) -> ToolChoice | None:
    if isinstance(body.tool_choice, NamedResponseTool):
        return NamedTool(type="function", function=NamedFunction(name=body.tool_choice.name))
    return body.tool_choice


def tools_of(body: ResponsesRequest) -> list[Tool]:
    return [tool_of(tool) for tool in body.tools or ()]


def tool_of(tool: ResponseTool) -> Tool:
    shared = {key: getattr(tool, key) for key in ("name", "description", "parameters", "strict")}
    return Tool(type="function", function=ToolFunction(**shared))


def cut_by(sequence: FollowedAnswer, parts: SplitAnswer) -> str | None:
    """Return why an answer is incomplete, if it is. A stop string inside a tool call cuts the call short."""
    if sequence.cut and parts.broken_off:
        return "stop"
    return None if sequence.finish is None else INCOMPLETE.get(sequence.finish)


@dataclass(frozen=True, slots=True)
class ConversationBefore:
    """What a response's storage needs: its own items, and the response that it goes on with."""

    front: Front
    tenant: Tenant
    stores: bool
    items: bytes
    before: StoredAnswer | None


class ResponseAnswer:
    """Runs one request through the engine and shapes its response."""

    def __init__(self, front: Front, body: ResponsesRequest, memory: ConversationBefore) -> None:
        self.front = front
        self.body = body
        self.memory = memory
        self.stores = memory.stores
        self.name = new_name("resp_")
        self.created = int(time.time())
        self.turn = turn_of(front, body)
        self.scored = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        self._events = Events(self.name)

    async def start(self, request: Request, prompt: Prompt) -> Generation:
        most = ("max_output_tokens", self.body.max_output_tokens)
        logprobs = (self.body.top_logprobs or 0) if self.scored else None
        return await self.turn.generate(
            prompt,
            self.body,
            request.state.tenant,
            self.name,
            max_tokens=most,
            logprobs=logprobs,
            keeps_answer=self.stores,
        )

    # whole response ---------------------------------------------------------------------------------------------------

    def whole(self, sequence: FollowedAnswer) -> dict[str, Any]:
        parts = self.turn.parts()
        events = Events(self.name)
        events.take(parts.feed(sequence.answer.text) + parts.finish())
        cut = cut_by(sequence, parts)
        events.end(self._logprobs(sequence), whole=cut is None or not parts.broken_off)
        return self._kept(self._response(events.output, sequence, cut, parts.reasoning), sequence)

    def _kept(self, response: dict[str, Any], sequence: FollowedAnswer) -> dict[str, Any]:
        """Store a response, if it is to be, and return it."""
        memory = self.memory
        if self.stores and sequence.finish in (FinishReason.STOP, FinishReason.LENGTH):
            salt = self.body.cache_salt
            stored_responses.keep(memory.front, memory.tenant, response, memory.items, salt, memory.before, sequence)
        return response

    def _logprobs(self, sequence: FollowedAnswer) -> list[Any]:
        return chat_logprobs(self.front.tokenizer, sequence.outputs).content if self.scored else []

    def _response(
        self,
        output: list[dict[str, Any]],
        sequence: FollowedAnswer | None = None,
        cut: str | None = None,
        thought: str = "",
    ) -> dict[str, Any]:
        """Return the response so far; for a finished one, pass its sequence and what cut it short."""
        body = self.body
        format_ = body.text.format if body.text and body.text.format else TextFormat()
        return {
            "id": self.name,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress" if sequence is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.front.model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": self.stores,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {k: v for k, v in msgspec.to_builtins(format_).items() if v is not None}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [msgspec.to_builtins(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if sequence is None else self._usage(sequence, thought),
            "user": body.user,
        }

    def _usage(self, sequence: FollowedAnswer, thought: str) -> dict[str, Any]:
        prompt, report = len(sequence.request.prompt), sequence.report
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": report.cached_tokens, "miss": miss_of(report)},
            "output_tokens": sequence.generated,
            "output_tokens_details": {"reasoning_tokens": self.front.count(thought)},
            "total_tokens": prompt + sequence.generated,
        }

    # streamed response ------------------------------------------------------------------------------------------------

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        parts, sequence, events = self.turn.parts(), generation.sequences[0], self._events
        for kind in ("response.created", "response.in_progress"):
            yield named_event(*events.numbered(kind, {"response": self._response([])}))
        async for piece in generation:
            generation.check(piece)
            scored = chat_logprobs(self.front.tokenizer, piece.outputs).content if self.scored else []
            for each in events.take(parts.feed(piece.text), scored):
                yield named_event(*each)
        last = events.take(parts.finish())
        cut = cut_by(sequence, parts)
        for each in [*last, *events.end(self._logprobs(sequence), whole=cut is None or not parts.broken_off)]:
            yield named_event(*each)
        thought = parts.reasoning
        found = await self.front.run_off_loop(
            len(thought), lambda: self._kept(self._response(events.output, sequence, cut, thought), sequence)
        )
        yield named_event(*events.numbered(f"response.{found['status']}", {"response": found}))

    def failed(self, error: Exception) -> bytes:
        body = describe(error)[1].error
        found = self._response(self._events.output)
        found |= {"status": "failed", "error": {"code": body.code or body.type, "message": body.message}}
        return named_event(*self._events.numbered("response.failed", {"response": found}))
