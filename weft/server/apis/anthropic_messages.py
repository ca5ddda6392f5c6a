"""Bodies of Anthropic's Messages API, checked, and converted to the conversations, tools and choices of the chat API.

From there on, both APIs are the same: `openai_messages.py` checks conversations, `chat_turn.py` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.base.errors import InvalidField
from weft.server.settings import Limits
from weft.server.texts.bodies import check_items
from weft.server.texts.openai_messages import (
    CacheControl,
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
from weft.server.texts.schemas import CacheFields

# Between the texts of consecutive messages of one role, which count as one message.
BETWEEN = "\n\n"


class MessageBlock(msgspec.Struct, kw_only=True):
    """A block of a message, by its type. Only text: images and documents are refused, and nothing is ever fetched."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[MessageBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[MessageBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """`adaptive` leaves the decision to the model. `display` says whether the answer includes the text."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Annotated[str, Meta(max_length=16)] | None = None
    format: OutputFormat | None = None


class CountRequest(CacheFields, kw_only=True):
    """A conversation: what /v1/messages/count_tokens takes, and the part of /v1/messages that becomes the prompt."""

    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[MessageBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None


@dataclass(slots=True)
class Converted:
    """Messages of the chat API, and the place of each in the body.

    `thinking` has the texts of each message's thinking blocks, by its index. They are joined once, at the end.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    thinking: dict[int, list[str]] = field(default_factory=dict)

    def add(self, message: ChatMessage, place: str) -> ChatMessage:
        self.messages.append(message)
        self.places.append(place)
        return message

    def join_thinking(self) -> None:
        for place, texts in self.thinking.items():
            self.messages[place].reasoning_content = "".join(texts)


def is_prefilled(body: CountRequest) -> bool:
    """Return whether the conversation ends with the beginning of the answer."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def check_unsupported(body: CountRequest) -> None:
    if is_prefilled(body):
        _check_prefill(body)
    for place, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise InvalidField(f"tools[{place}].type", f"is {tool.type!r:.60}; only custom tools are supported")
        if tool.input_schema is None:
            raise InvalidField(f"tools[{place}].input_schema", "must be given")
        if tool.defer_loading:
            raise InvalidField(f"tools[{place}].defer_loading", "is not supported: the model sees all tools")
        if tool.input_examples:
            raise InvalidField(f"tools[{place}].input_examples", "is not supported: describe examples in words")


def _check_prefill(body: CountRequest) -> None:
    """Refuse what would have to begin where the answer already has."""
    if body.thinking is not None and body.thinking.type == "enabled":
        raise InvalidField("thinking.type", "must not be enabled if the last message is the beginning of the answer")
    if body.output_config is not None and body.output_config.format is not None:
        raise InvalidField("output_config.format", "excludes a last message that is the beginning of the answer")


# conversations --------------------------------------------------------------------------------------------------------


def messages_of(body: CountRequest, limits: Limits) -> Converted:
    """Return the conversation as messages of the chat API."""
    check_items("messages", body.messages, limits.messages)
    if not body.messages:
        raise InvalidField("messages", "must have at least one message")
    found = Converted()
    if body.system:
        content = body.system if isinstance(body.system, str) else parts_of(body.system, "system")
        found.add(ChatMessage(role="system", content=content), "system")
    before = None
    for place, message in enumerate(body.messages):
        where = f"messages[{place}]"
        blocks = (
            [MessageBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        )
        joins = message.role == before
        if message.role == "user":
            _add_user(found, blocks, where, joins)
        else:
            _add_assistant(found, blocks, where, joins)
        before = message.role
    found.join_thinking()
    _declare(body, found)
    return found


def _declare(body: CountRequest, found: Converted) -> None:
    """Declare what the whole body declares: its end, and the tools, which precede or share the system message."""
    if body.cache_control is not None:
        found.messages[-1].cache_control = body.cache_control
    if found.places[0] == "system" and any(tool.cache_control is not None for tool in body.tools or ()):
        found.messages[0].cache_control = CacheControl()


def parts_of(blocks: Sequence[MessageBlock], where: str) -> list[ContentPart]:
    return [part_of(block, f"{where}[{place}]") for place, block in enumerate(blocks)]


def part_of(block: MessageBlock, where: str) -> ContentPart:
    if block.type != "text":
        raise InvalidField(f"{where}.type", f"is {block.type!r:.40}; only text is supported here, nothing is fetched")
    return ContentPart(type="text", text=block.text, cache_control=block.cache_control)


def _add_user(found: Converted, blocks: Sequence[MessageBlock], where: str, joins: bool) -> None:
    """Add results of tools, each as a message, and texts in between."""
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        if block.type == "tool_result":
            found.add(_result(block, here), here)
        else:
            _add_text(found, "user", part_of(block, here), where, joins and not place)
    if not blocks:
        raise InvalidField(f"{where}.content", "must not be empty")


def _add_text(found: Converted, role: str, part: ContentPart, where: str, joins: bool) -> None:
    """Add a text to the last message if that is of the same role, or else as a new message."""
    last = found.messages[-1] if found.messages else None
    if last is None or last.role != role or not isinstance(last.content, list):
        found.add(ChatMessage(role=role, content=[part]), where)
        return
    if joins and last.content:
        last.content.append(ContentPart(type="text", text=BETWEEN))
    last.content.append(part)


def _result(block: MessageBlock, where: str) -> ChatMessage:
    """Return the output of a tool. An error begins with that word: templates have no other sign for it."""
    if block.tool_use_id is None:
        raise InvalidField(f"{where}.tool_use_id", "must be given")
    content = block.content or ""
    parts = (
        [ContentPart(type="text", text=content)] if isinstance(content, str) else parts_of(content, f"{where}.content")
    )
    if block.is_error:
        parts.insert(0, ContentPart(type="text", text="Error: "))
    return ChatMessage(role="tool", content=parts, tool_call_id=block.tool_use_id, cache_control=block.cache_control)


def _add_assistant(found: Converted, blocks: Sequence[MessageBlock], where: str, joins: bool) -> None:
    last = found.messages[-1] if joins else found.add(ChatMessage(role="assistant", content=[]), where)
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        match block.type:
            case "tool_use":
                last.tool_calls = [] if last.tool_calls is None else last.tool_calls
                last.tool_calls.append(_call(block, here))
                last.cache_control = block.cache_control or last.cache_control
            case "thinking":
                if block.thinking is None:
                    raise InvalidField(f"{here}.thinking", "must be a string")
                found.thinking.setdefault(len(found.messages) - 1, []).append(block.thinking)
            case "redacted_thinking":
                raise InvalidField(f"{here}.type", "is 'redacted_thinking', which only its author can read; remove it")
            case _:
                _add_text(found, "assistant", part_of(block, here), where, joins and not place)


def _call(block: MessageBlock, where: str) -> CalledTool:
    if block.id is None or block.name is None or block.input is None:
        raise InvalidField(where, "is a tool_use and must have id, name and input")
    return CalledTool(id=block.id, function=CalledFunction(name=block.name, arguments=block.input))


# tools and thinking ---------------------------------------------------------------------------------------------------


def tools_of(body: CountRequest) -> list[Tool]:
    return [
        Tool(
            type="function",
            function=ToolFunction(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in body.tools or ()
    ]


def choice_of(body: CountRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidField("tool_choice.name", "must be given with the type tool")
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def variables_of(body: CountRequest) -> dict[str, Any]:
    """Return the template's variables for thinking. Templates differ in their names for it."""
    thinking = body.thinking
    if thinking is None or thinking.type == "adaptive":
        return {}
    wanted = thinking.type == "enabled"
    found: dict[str, Any] = {"enable_thinking": wanted, "thinking": wanted}
    if wanted and thinking.budget_tokens is not None:
        found["thinking_budget"] = thinking.budget_tokens
    return found
