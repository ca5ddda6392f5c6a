"""Values of JSON that some parsers take and others do not: a 400 that names the field, never a 500.

Each is sent in every field that holds a schema, once in a body that the front reads, once in one for a text worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import RICH
from weft.server.texts.body_reader import SMALL_BYTES

# Python's JSON takes all of these, and the compiler of grammars none.
REFUSED_AS_TEXT = {
    "a constant that is no number": '{"const": NaN}',
    "infinity": '{"maximum": Infinity}',
    "minus infinity": '{"minimum": -Infinity}',
    "a float out of range": '{"maximum": 1e999}',
    "a negative float out of range": '{"enum": [-1e999]}',
    "a lone surrogate": '{"const": "\\ud800"}',
    "a lone surrogate as a name": '{"properties": {"\\udc00": {}}}',
    "a lone surrogate in a pattern": '{"type": "string", "pattern": "\\ud800"}',
    "an integer of 400 digits": '{"maximum": ' + "9" * 400 + "}",
    "a negative integer of 400 digits": '{"const": -' + "9" * 400 + "}",
    "an integer of 5000 digits": '{"const": ' + "9" * 5000 + "}",
    "deep nesting": '{"items":' * 300 + "{}" + "}" * 300,
    "a bound that fits no machine word": '{"type": "string", "minLength": 100000000000000000000}',
}
# The body's own parser refuses the others before there is a field to name.
REFUSED_AS_VALUES = ("an integer of 400 digits", "a negative integer of 400 digits", "an integer of 5000 digits")
TAKEN = {
    "a name given twice": '{"type": "object", "type": "integer"}',
    "a property given twice": '{"type": "object", "properties": {"a": {"const": 1}, "a": {"const": 2}}}',
    "an integer beyond 64 bits": '{"type": "object", "properties": {"a": {"const": 1180591620717411303424}}}',
    "the largest float": '{"type": "object", "properties": {"a": {"const": 1e308}}}',
    "a zero character": '{"type": "object", "properties": {"a": {"const": "\\u0000"}}}',
}

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "a"}]
# The answer's grammar becomes part of another one, which allows reasoning before it.
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
Make = Callable[[Any], dict[str, Any]]


def native(schema: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": {"max_new_tokens": 2, "json_schema": schema}}


def required(tool: Any, **more: Any) -> dict[str, Any]:
    return {"messages": SAID, "max_tokens": 2, "tools": [tool], **more}


def function(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}


def formatted(schema: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": SAID, "max_tokens": 2, "response_format": shape}


def response(schema: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "name": "a", "schema": schema}
    return {"input": "a", "max_output_tokens": 2, "text": {"format": shape}}


def output_format(schema: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "schema": schema}
    return {"messages": SAID, "max_tokens": 2, "output_config": {"format": shape}}


def response_tools(schema: Any) -> dict[str, Any]:
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    return {"input": "a", "max_output_tokens": 2, "tool_choice": "required", "tools": tools}


# Fields that hold a schema as text, and fields that hold it as an object: the field, its route, and a body.
TEXTS: list[tuple[str, str, Make]] = [
    ("guided_json", COMPLETIONS, lambda s: {"prompt": "a", "max_tokens": 2, "guided_json": s}),
    ("guided_json", CHAT, lambda s: {"messages": SAID, "max_tokens": 2, "guided_json": s}),
    ("guided_json", CHAT, lambda s: {"messages": SAID, "max_tokens": 2, "guided_json": s, **THINKING}),
    ("structured_outputs.json", CHAT, lambda s: {"messages": SAID, "max_tokens": 2, "structured_outputs": {"json": s}}),
    ("sampling_params.json_schema", "/generate", native),
]
VALUES: list[tuple[str, str, Make]] = [
    *TEXTS,
    ("response_format.json_schema.schema", CHAT, formatted),
    ("text.format.schema", RESPONSES, response),
    ("output_config.format.schema", MESSAGES, output_format),
    ("tools", CHAT, lambda s: required(function(s), tool_choice="required")),
    ("tools", CHAT, lambda s: required(function(s))),
    ("tools", RESPONSES, response_tools),
    ("tools", MESSAGES, lambda s: required({"name": "f", "input_schema": s}, tool_choice={"type": "any"})),
]


@pytest.fixture(scope="module")
def served():
    with serving(template=RICH) as found:
        yield found


def answer(served: Served, path: str, body: str, large: bool) -> tuple[int, dict[str, Any]]:
    """Send a body, which a text worker reads if it is `large`."""
    data = body + " " * SMALL_BYTES if large else body
    found = served.client.post(path, content=data.encode(), headers={"content-type": "application/json"})
    return found.status_code, found.json()


def with_value(body: dict[str, Any], value: str) -> str:
    """Return a body as JSON in which a value stands as it is written."""
    return json.dumps(body).replace('"@"', value)


@pytest.mark.parametrize("large", [False, True], ids=["front", "worker"])
@pytest.mark.parametrize("what", REFUSED_AS_TEXT)
def test_odd_json_as_text_is_refused_by_the_name_of_its_field(served: Served, what: str, large: bool) -> None:
    for field, path, make in TEXTS:
        status, found = answer(served, path, json.dumps(make(REFUSED_AS_TEXT[what])), large)
        assert (status, found["error"]["param"]) == (400, field), (path, found)


@pytest.mark.parametrize("large", [False, True], ids=["front", "worker"])
@pytest.mark.parametrize("what", REFUSED_AS_TEXT)
def test_odd_json_as_a_value_is_refused(served: Served, what: str, large: bool) -> None:
    for field, path, make in VALUES:
        status, found = answer(served, path, with_value(make("@"), REFUSED_AS_TEXT[what]), large)
        assert status == 400, (path, found)
        if what in REFUSED_AS_VALUES:
            assert found["error"]["message"].startswith(field), (path, found)


@pytest.mark.parametrize("large", [False, True], ids=["front", "worker"])
@pytest.mark.parametrize("what", TAKEN)
def test_json_that_every_parser_takes_is_taken_wherever_it_is_read(served: Served, what: str, large: bool) -> None:
    for _, path, make in VALUES:
        status, found = answer(served, path, with_value(make("@"), TAKEN[what]), large)
        assert status == 200, (path, found)
    for _, path, make in TEXTS:
        status, found = answer(served, path, json.dumps(make(TAKEN[what])), large)
        assert status == 200, (path, found)


@pytest.mark.parametrize("large", [False, True], ids=["front", "worker"])
def test_integers_of_any_size_may_be_in_every_field_beside_the_prompt(served: Served, large: bool) -> None:
    """Fields that are no grammar: a template's variables, and a tool whose schema nothing enforces."""
    for body in (
        {"messages": SAID, "max_tokens": 2, "chat_template_kwargs": {"x": "@"}},
        required({"type": "function", "function": {"name": "f", "parameters": {"const": "@"}}}),
    ):
        for digits in (20, 400):
            status, found = answer(served, CHAT, with_value(body, "9" * digits), large)
            assert status == 200, found


@pytest.mark.parametrize("large", [False, True], ids=["front", "worker"])
@pytest.mark.parametrize("field", ["guided_regex", "guided_grammar", "guided_choice"])
def test_odd_texts_of_other_grammars_are_refused_by_the_name_of_their_field(
    served: Served, field: str, large: bool
) -> None:
    texts = ['start: %json {"const": 1e999}', "(?<=a)b", "start: \ud7ff(", "["]
    for path, rest in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": SAID}),
        (CHAT, {"messages": SAID, **THINKING}),
    ):
        for text in texts:
            value: Any = [text, 1] if field == "guided_choice" else text
            status, found = answer(served, path, json.dumps({**rest, "max_tokens": 2, field: value}), large)
            assert status == 400, (text, found)
            assert found["error"]["message"].startswith(field), found
