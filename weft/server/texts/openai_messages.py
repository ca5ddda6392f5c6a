"""Conversations and tools as OpenAI's clients send them, checked, and converted for chat templates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.base.errors import InvalidField
from weft.base.retain import ttl_seconds
from weft.server.settings import Limits
from weft.server.texts.bodies import check_items, check_schema, read_json
from weft.text.template import ROLE_FORM, is_role

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class CacheControl(msgspec.Struct, kw_only=True):
    """Declares that the conversation up to here will be sent again; as in Anthropic's API."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message. Only text: images, audio and files are refused, and nothing is ever fetched."""

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheControl | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class CalledTool(msgspec.Struct, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None


class ToolFunction(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def plain_messages(
    messages: list[ChatMessage], limits: Limits, places: Sequence[str] = (), field: str = "messages"
) -> list[dict[str, Any]]:
    """Return messages as templates expect them; errors name their places in the body.

    Newer clients say "developer" for "system".
    """
    if not messages:
        raise InvalidField(field, "must have at least one message")
    check_items(field, messages, limits.messages)
    points = sum(1 for message in messages for _ in declared_points(message))
    if points > limits.cache_points:
        raise InvalidField(field, f"has {points} cache_control points; the limit is {limits.cache_points}")
    named = places or [f"{field}[{place}]" for place in range(len(messages))]
    return [_plain(message, where, limits) for message, where in zip(messages, named, strict=True)]


def declared_points(message: ChatMessage) -> Iterator[CacheControl]:
    parts = message.content if isinstance(message.content, list) else []
    found = [message.cache_control, *(part.cache_control for part in parts)]
    return (each for each in found if each is not None)


def retained_seconds(messages: Sequence[ChatMessage], field: str = "messages") -> float:
    """Return the longest `ttl` of the conversation's `cache_control` points, in seconds; 0: none has one."""
    longest = 0.0
    for message in messages:
        for point in declared_points(message):
            seconds = 0.0 if point.ttl is None else ttl_seconds(point.ttl)
            if seconds is None:
                raise InvalidField(field, f"has a cache_control ttl of {point.ttl!r:.40}; it must be such as 5m or 1h")
            longest = max(longest, seconds)
    return longest


def _plain(message: ChatMessage, where: str, limits: Limits) -> dict[str, Any]:
    if not is_role(message.role):
        raise InvalidField(f"{where}.role", ROLE_FORM)
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = _content(message.content, where)
    if found["content"] is None:
        if not message.tool_calls:
            raise InvalidField(f"{where}.content", "must be a string or a list of parts")
        found["content"] = ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [_called(call, place, f"{where}.tool_calls[{place}]", limits) for place, call in calls]
    if message.cache_control is not None:
        found["cache_control"] = {"type": "ephemeral"}
    return found


def _content(content: str | list[ContentPart] | None, where: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    parts = [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
    if any("cache_control" in part for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: ContentPart, where: str) -> dict[str, Any]:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        raise InvalidField(f"{where}.type", f"is {part.type!r:.40}; only text is supported, and nothing is fetched")
    if text is None:
        raise InvalidField(f"{where}.text", "must be a string")
    found: dict[str, Any] = {"type": "text", "text": text}
    if part.cache_control is not None:
        found["cache_control"] = {"type": "ephemeral"}
    return found


def _called(call: CalledTool, place: int, where: str, limits: Limits) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which templates expect; clients send them as text."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            value = read_json(f"{where}.function.arguments", arguments or "{}", limits.json_depth)
        except ValueError:
            value = None
        arguments = value if isinstance(value, dict) else arguments
    name = call.id or f"call_{place}"
    return {"id": name, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def plain_tools(tools: list[Tool] | None, limits: Limits) -> list[dict[str, Any]]:
    """Return tools as templates expect them, each within bounds and with a unique name."""
    check_items("tools", tools, limits.tools)
    found, names = [], set()
    for place, tool in enumerate(tools or ()):
        function, where = tool.function, f"tools[{place}].function"
        if not TOOL_NAME.fullmatch(function.name):
            raise InvalidField(f"{where}.name", "must be 1 to 64 letters, digits, dots, underscores and dashes")
        if function.name in names:
            raise InvalidField(f"{where}.name", f"{function.name!r} is given twice")
        names.add(function.name)
        parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
        check_schema(f"{where}.parameters", parameters, limits)
        plain: dict[str, Any] = {"name": function.name, "description": function.description or ""}
        found.append({"type": "function", "function": {**plain, "parameters": parameters}})
    return found


def wanted_tools(
    tools: list[Tool] | None, choice: ToolChoice | None, limits: Limits
) -> tuple[list[dict[str, Any]], str]:
    """Return the tools that the model sees, and the choice among them (see `chosen_tool`)."""
    known = plain_tools(tools, limits)
    wanted = chosen_tool(choice, known)
    return (known if wanted != "none" else []), wanted


def chosen_tool(choice: ToolChoice | None, tools: list[dict[str, Any]]) -> str:
    """Return the tool choice: "auto", "none", "required", or the name of one after "name:"."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise InvalidField("tool_choice", 'is "required", but the request has no tools')
        return choice if tools else "none"
    name = choice.function.name
    if name not in [tool["function"]["name"] for tool in tools]:
        raise InvalidField("tool_choice.function.name", f"{name!r:.80} is not one of the tools")
    return "name:" + name
