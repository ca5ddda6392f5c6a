"""Answers in Ollama's form: whole, or line by line as they grow."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from weft.answers.followed import FollowedAnswer
from weft.base.errors import InvalidField
from weft.engine.events import FinishReason, Output
from weft.server.access.auth import Tenant
from weft.server.apis.chat_turn import ChatTurn
from weft.server.apis.ollama.bodies import (
    OPTION_NAMES,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaOptions,
    form_of,
)
from weft.server.apis.openai_shapes import chat_logprobs
from weft.server.apis.split_answer import ToolCall
from weft.server.front import Front, new_name
from weft.server.generation import Generation
from weft.server.texts.prompt_builder import Prompt
from weft.text.answer_parts import AnswerPart

Object = dict[str, Any]
ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class OllamaAnswer:
    """Runs one request through the engine and shapes its answer, for `/api/chat` or `/api/generate`."""

    def __init__(self, front: Front, body: OllamaFields, prompt: Prompt) -> None:
        self.front = front
        self.body = body
        self.prompt = prompt
        self.options = body.options or OllamaOptions()
        self.began = time.perf_counter()
        chat = isinstance(body, OllamaChatRequest)
        self.is_chat = chat
        self.turn = ChatTurn(
            front,
            field="messages" if chat else "prompt",
            tools=body.tools if isinstance(body, OllamaChatRequest) else None,
            form=form_of(body, front.limits),
            reasoning=body.think is not False,
        )

    async def start(self, tenant: Tenant) -> Generation:
        body = self.body
        fields = self.options.common()
        fields.cache_salt, fields.priority, fields.retain = body.cache_salt, body.priority, body.retain
        most = ("options.num_predict", self.options.max_tokens)
        scored = (body.top_logprobs or 0) if body.logprobs else None
        try:
            return await self.turn.generate(
                self.prompt, fields, tenant, new_name("ollama-"), max_tokens=most, logprobs=scored
            )
        except InvalidField as error:
            name = OPTION_NAMES.get(error.field or "", error.field)
            if name not in OllamaOptions.__struct_fields__:
                raise
            raise InvalidField(f"options.{name}", error.complaint) from None

    # shapes -----------------------------------------------------------------------------------------------------------

    def whole(self, generation: Generation) -> Object:
        sequence, parts = generation.sequences[0], self.turn.parts()
        parts.feed(sequence.answer.text)
        parts.finish()
        found = self._line(parts.content, parts.reasoning, parts.calls, sequence.outputs)
        return found | self._end(generation)

    async def lines(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield the answer as lines of JSON. A tool call is sent once it is complete, as in Ollama."""
        sequence, parts, sent = generation.sequences[0], self.turn.parts(), 0
        async for piece in generation:
            generation.check(piece)
            grown = parts.feed(piece.text)
            if piece.finish is not None:
                grown = grown + parts.finish()
            # All calls but the last are complete.
            ended = len(parts.calls) if piece.finish is not None else max(sent, len(parts.calls) - 1)
            content, thinking = text_of(grown, "content"), text_of(grown, "reasoning")
            calls, sent = parts.calls[sent:ended], ended
            if content or thinking or calls or (self.body.logprobs and piece.outputs):
                yield as_line(self._line(content, thinking, calls, piece.outputs))
        yield as_line(self._line("", "", [], []) | self._end(generation))
        assert sequence.finish is not None

    def _line(self, content: str, thinking: str, calls: list[ToolCall], outputs: list[Output]) -> Object:
        """Return a piece of the answer, which is not the last one yet."""
        found = heading(self.front.model_name)
        shown: Object = {"thinking": thinking} if thinking else {}
        if self.is_chat:
            message: Object = {"role": "assistant", "content": content, **shown}
            if calls:
                message["tool_calls"] = [call_of(call) for call in calls]
            found["message"] = message
        else:
            found |= {"response": content, **shown}
        if self.body.logprobs and outputs:
            found["logprobs"] = msgspec.to_builtins(chat_logprobs(self.front.tokenizer, outputs).content)
        return found | {"done": False}

    def _end(self, generation: Generation) -> Object:
        """Return what the last line has besides: why the answer ended, counts, and times in nanoseconds."""
        sequence: FollowedAnswer = generation.sequences[0]
        now = time.perf_counter()
        first = generation.first_token_seconds or now
        computing = self.began + generation.queued_seconds
        reason = FinishReason.ABORT if sequence.finish is None else sequence.finish
        return {
            "done": True,
            "done_reason": ENDS.get(reason, str(reason)),
            "total_duration": nanoseconds(now - self.began),
            "load_duration": 0,
            "prompt_eval_count": len(self.prompt.tokens),
            "prompt_eval_duration": nanoseconds(first - computing),
            "eval_count": sequence.generated,
            "eval_duration": nanoseconds(now - first),
        }


def heading(model: str) -> Object:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def nothing(model: str, body: OllamaChatRequest | OllamaGenerateRequest) -> Object:
    """Return the answer to a body without a prompt, which asks to load the model, or to unload it."""
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    empty: Object = {"response": ""}
    if isinstance(body, OllamaChatRequest):
        empty = {"message": {"role": "assistant", "content": ""}}
    return heading(model) | empty | {"done": True, "done_reason": reason}


def call_of(call: ToolCall) -> Object:
    """Return a call with its arguments as an object. Arguments that were cut short are an empty one."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = {}
    return {
        "id": call.id,
        "function": {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else {}},
    }


def text_of(parts: list[AnswerPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def as_line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"
