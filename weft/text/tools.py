"""Separates tool calls from the rest of an answer, in the format of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.errors import OptionError
from weft.text.answer_parts import call_id, short_call_id
from weft.text.formats import harmony, json_calls, pythonic, tagged
from weft.text.parsing import TextParser
from weft.text.scanner import Reading, Scanner

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`markers` may be special tokens of the model; the parser needs to see them in the text."""

    read: Callable[[Scanner, Sequence[Tool]], Reading]
    markers: tuple[str, ...] = ()
    make_id: Callable[[], str] = call_id


FORMATS = {
    "hermes": ToolFormat(
        lambda scanner, tools: json_calls.marked(scanner, ("<tool_call>",), ("</tool_call>",)),
        ("<tool_call>", "</tool_call>"),
    ),
    "qwen3_coder": ToolFormat(
        lambda scanner, tools: tagged.tagged(scanner, schemas_of(tools)), ("<tool_call>", "</tool_call>")
    ),
    "lfm2": ToolFormat(
        lambda scanner, tools: pythonic.between(
            scanner, "<|tool_call_start|>", "<|tool_call_end|>", positions_of(tools)
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "llama3_json": ToolFormat(
        lambda scanner, tools: json_calls.bare(scanner, "<|python_tag|>", schemas_of(tools) if tools else None),
        ("<|python_tag|>",),
    ),
    "mistral": ToolFormat(
        lambda scanner, tools: json_calls.named(scanner, "[TOOL_CALLS]"),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        short_call_id,
    ),
    "granite": ToolFormat(
        lambda scanner, tools: json_calls.marked(
            scanner, ("<|tool_call|>", "<tool_call>"), ("</tool_call>", "<|end_of_text|>")
        ),
        ("<|tool_call|>", "<tool_call>", "</tool_call>"),
    ),
    "phi4": ToolFormat(
        lambda scanner, tools: json_calls.marked(scanner, ("<|tool_call|>",), ("<|/tool_call|>",)),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "olmo3": ToolFormat(
        lambda scanner, tools: pythonic.between(scanner, "<function_calls>", "</function_calls>", positions_of(tools)),
        ("<function_calls>", "</function_calls>"),
    ),
    "nemotron": ToolFormat(
        lambda scanner, tools: json_calls.marked(scanner, ("<TOOLCALL>",), ("</TOOLCALL>",)),
        ("<TOOLCALL>", "</TOOLCALL>"),
    ),
    "gemma": ToolFormat(lambda scanner, tools: pythonic.fenced(scanner, positions_of(tools))),
    "harmony": ToolFormat(lambda scanner, tools: harmony.harmony(scanner), harmony.MARKERS),
}

# Text in a family's chat template that identifies its tool-call format; the first match counts.
_SIGNS = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_coder"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<TOOLCALL>", "nemotron"),
    ("[TOOL_CALLS]", "mistral"),
    ("[AVAILABLE_TOOLS]", "mistral"),
    ("<|/tool", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<function_calls>", "olmo3"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("tool_code", "gemma"),
)
_FAMILIES = (
    ("gpt_oss", "harmony"),
    ("lfm", "lfm2"),
    ("qwen3_5", "qwen3_coder"),
    ("qwen", "hermes"),
    ("granite", "granite"),
    ("mistral", "mistral"),
    ("nemotron", "nemotron"),
    ("gemma", "gemma"),
    ("llama", "llama3_json"),
    ("falcon", "hermes"),
    ("smollm3", "hermes"),
    ("phi", "phi4"),
    ("olmo3", "olmo3"),
)


def parser_for(name: str, tools: Sequence[Tool] = ()) -> TextParser:
    """Return a parser by the name of its format. `tools` are the request's, as in the API."""
    if name not in FORMATS:
        raise OptionError(f"tool_parser must be one of {', '.join(FORMATS)}, got {name!r}")
    form = FORMATS[name]
    scanner = Scanner(form.make_id)
    return TextParser(scanner, form.read(scanner, tools), form.markers)


def detect_tools(family: str, template: str | None) -> str | None:
    """Return the format of a model's tool calls, by its chat template, or by its `model_type` or architecture."""
    if template is not None:
        for sign, name in _SIGNS:
            if sign in template:
                return name
        if "tools" not in template:
            return None
    plain = family.lower().replace("_", "")
    return next((name for part, name in _FAMILIES if part.replace("_", "") in plain), None)


def function_of(tool: Tool) -> Mapping[str, Any]:
    """Return a tool's name and parameters, with or without a `function` around them."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    found = function_of(tool).get("parameters")
    return found if isinstance(found, Mapping) else {}


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the parameter schemas of each tool."""
    found = {str(function_of(tool).get("name")): parameters_of(tool).get("properties") for tool in tools}
    return {name: each if isinstance(each, Mapping) else {} for name, each in found.items()}


def positions_of(tools: Sequence[Tool]) -> dict[str, list[str]]:
    """Return the parameter names of each tool, in order."""
    return {name: list(parameters) for name, parameters in schemas_of(tools).items()}
