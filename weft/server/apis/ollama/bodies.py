"""Bodies of Ollama's API, and what they mean in terms of the chat API: messages, sampling, form, thinking."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.server.settings import Limits
from weft.server.texts.grammars import Form, from_json
from weft.server.texts.openai_messages import CalledFunction, CalledTool, ChatMessage, Tool
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import CacheFields, Penalty, SamplingFields, Seed

# Ollama's default for `repeat_last_n`; clients that send all defaults mean nothing by it.
USUAL_WINDOW = 64
EFFORTS = ("low", "medium", "high")
# What 0 means as a probability to keep: as little as there is.
LEAST_TOP_P = 1e-6


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The object `options`: sampling and stopping under Ollama's names."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    num_ctx: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    stop: str | list[str] | None = None

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of the answer; numbers below 1 mean all that fit."""
        return self.num_predict if (self.num_predict or 0) > 0 else None

    def common(self) -> SamplingFields:
        """Return the same parameters under the names of the other routes."""
        same = ("temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
        return SamplingFields(
            **{name: getattr(self, name) for name in same},
            top_p=None if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            # A window of no tokens turns the penalty off.
            repetition_penalty=1.0 if self.repeat_last_n == 0 else self.repeat_penalty,
        )

    def check(self, room: int) -> None:
        """Refuse a value that would change the answer if it were ignored. `room` is the context of the server."""
        if (self.num_ctx or 0) > room:
            raise InvalidField("options.num_ctx", f"is {self.num_ctx}, but the server's context has {room} tokens")
        if (self.repeat_penalty or 1) != 1 and self.repeat_last_n not in (None, -1, 0, USUAL_WINDOW):
            raise InvalidField("options.repeat_last_n", "must be -1 or 0: repeat_penalty counts all tokens or none")


# Names of the fields of `options` in other APIs.
OPTION_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = None


class OllamaCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFields(CacheFields, kw_only=True):
    """Fields of both routes that generate. `keep_alive` is a hint: seconds, or a duration such as `5m`."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None


def check(builder: PromptBuilder, body: OllamaFields) -> None:
    """Check what both routes share."""
    builder.check_model(body.model)
    (body.options or OllamaOptions()).check(builder.facts.room)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs", "needs logprobs: true")
    if isinstance(body.think, str) and body.think not in EFFORTS:
        raise InvalidField("think", f"must be true, false or one of {', '.join(EFFORTS)}, got {body.think!r:.40}")


def thinking_of(body: OllamaFields) -> tuple[dict[str, Any], str | None]:
    """Return the template's variables for thinking, and the effort. Templates differ in their names for it."""
    if body.think is None:
        return {}, None
    wanted = bool(body.think)
    return {"enable_thinking": wanted, "thinking": wanted}, body.think if isinstance(body.think, str) else None


def form_of(body: OllamaFields, limits: Limits) -> Form | None:
    """Return the form that `format` asks for: `json`, or a schema."""
    if not body.format:
        return None
    if isinstance(body.format, dict):
        return from_json("format", body.format, limits)
    if body.format != "json":
        raise InvalidField("format", f'must be "json" or a JSON schema, got {body.format!r:.40}')
    return Form(Grammar("json_object"), "format")


def no_images(images: list[Any] | None, field: str) -> None:
    if images:
        raise InvalidField(field, "are not supported: only text is, and nothing is fetched")


def chat_message(message: OllamaMessage, where: str) -> ChatMessage:
    """Return a message as the chat API has it."""
    no_images(message.images, f"{where}.images")
    calls = [
        CalledTool(
            id=call.id, function=CalledFunction(name=call.function.name, arguments=call.function.arguments or {})
        )
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking or None,
    )


def chat_prompts(builder: PromptBuilder, body: OllamaChatRequest) -> list[Prompt]:
    """Check a body and take its conversation out of it; without one, the body only asks to load the model."""
    check(builder, body)
    messages = [chat_message(each, f"messages[{place}]") for place, each in enumerate(body.messages or ())]
    if not messages:
        return []
    variables, effort = thinking_of(body)
    found = builder.render_conversation(messages, body.tools, None, variables, effort)
    body.messages = []
    return [found]


def generate_prompts(builder: PromptBuilder, body: OllamaGenerateRequest) -> list[Prompt]:
    """Check a body and take its prompt out of it; without one, the body only asks to load the model."""
    check(builder, body)
    no_images(body.images, "images")
    text, suffix, system = body.prompt or "", body.suffix, body.system
    body.prompt, body.suffix, body.system = "", None, None
    if not text and not suffix:
        return []
    if body.raw and (system or suffix):
        raise InvalidField("raw", "excludes system and suffix: the prompt is sent as it is")
    if suffix:
        return [builder.infill(text, suffix)]
    if body.raw or builder.template is None:
        return builder.encode([f"{system}\n\n{text}" if system else text], "prompt")
    asked = [ChatMessage(role="system", content=system)] if system else []
    variables, effort = thinking_of(body)
    return [
        builder.render_conversation(
            [*asked, ChatMessage(role="user", content=text)], None, None, variables, effort, field="prompt"
        )
    ]
