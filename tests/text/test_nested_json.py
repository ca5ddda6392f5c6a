"""JSON in a text that a client sends, or makes a model say, however deep: a 400 or plain text, never a 500."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers.http_server import Served, serving
from weft.base.errors import RequestError
from weft.text.grammar_source import checked_choices
from weft.text.tools import FORMATS, parser_for

# Python's parser gives up a little below 1,000 levels, its encoder and plain recursion somewhat earlier.
DEPTHS = (65, 300, 500, 700, 900, 960, 990, 1000, 5000, 8000)
SHAPES = {
    "arrays": lambda depth: "[" * depth + "]" * depth,
    "objects": lambda depth: '{"a":' * depth + "1" + "}" * depth,
    "unclosed": lambda depth: "[" * depth,
    "schema": lambda depth: '{"type":"array","items":' * depth + "{}" + "}" * depth,
}


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


def deep(depth: int, shape: str, most: int = 1 << 30) -> str:
    return SHAPES[shape](depth)[:most]


def guided(text: str) -> tuple[str, str, dict[str, Any]]:
    return "guided_json", "/v1/completions", {"prompt": "a", "guided_json": text}


def structured(text: str) -> tuple[str, str, dict[str, Any]]:
    return "structured_outputs.json", "/v1/completions", {"prompt": "a", "structured_outputs": {"json": text}}


def native(text: str) -> tuple[str, str, dict[str, Any]]:
    return "sampling_params.json_schema", "/generate", {"text": "a", "sampling_params": {"json_schema": text}}


def chat(text: str) -> tuple[str, str, dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    return "messages[1].tool_calls[0].function.arguments", "/v1/chat/completions", {"messages": said}


def responses(text: str) -> tuple[str, str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": text}
    said = [{"role": "user", "content": "a"}, call]
    return "input[1].arguments", "/v1/responses", {"input": said}


@pytest.mark.parametrize("field", [guided, structured, native, chat, responses])
@pytest.mark.parametrize("shape", SHAPES)
def test_deep_json_as_text_is_refused_by_the_name_of_its_field(served: Served, field, shape):
    for depth in DEPTHS:
        name, path, body = field(deep(depth, shape))
        error = served.post(path, body, status=400)["error"]
        assert error["param"] == name, (depth, error)
        assert "nested more than" in error["message"] or "the limit is 65536" in error["message"], (depth, error)


@pytest.mark.parametrize("field", [guided, structured, native])
def test_json_as_text_that_is_too_much_beside_a_prompt_is_refused_unread(served: Served, field):
    _, path, body = field(deep(60_000, "schema"))
    assert served.post(path, body, status=413)["error"]["code"] == "request_too_large"


def test_json_as_text_within_the_bounds_is_taken(served: Served):
    for field, depth in ((guided, 15), (native, 15), (chat, 60), (responses, 60)):
        _, path, body = field(deep(depth, "schema" if depth == 15 else "objects"))
        served.post(path, body | ({} if path == "/generate" else {"max_tokens": 1} if "v1/r" not in path else {}))


@pytest.mark.parametrize("form", FORMATS)
def test_calls_within_calls_without_end_are_no_calls(form):
    """What a model says may be what a client made it repeat."""
    pieces = ['{"function":' * 5000, '[{"name":"f","arguments":' + "[" * 5000, "print(" * 5000, "f(a=" + "[" * 5000]
    for marker in ("", *FORMATS[form].markers, "```tool_code\n", "<|tool_call_start|>[", "<tool_call>\n<function=f>\n"):
        for piece in pieces:
            parser = parser_for(form, [{"name": "f", "parameters": {"type": "object"}}])
            said = marker + piece
            for first in range(0, len(said), 997):
                parser.feed(said[first : first + 997])
            parser.finish()


def test_choices_without_end_are_an_error_of_their_own():
    with pytest.raises(RequestError, match="choice is not valid JSON"):
        checked_choices("[" * 50_000)
