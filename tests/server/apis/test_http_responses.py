"""OpenAI's newer API, /v1/responses: items in, items out, and events in their prescribed order. Tiny model."""

from __future__ import annotations

import json

import pytest

from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import CALL, LONG, RICH, SCHEMA, TOOLS
from weft.server.apis.responses_events import Events
from weft.server.settings import ServerSettings
from weft.text.output import output_parser

PATH = "/v1/responses"
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny", tool_parser="hermes"), template=RICH, max_sequences=16) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served):
    # Its import takes seconds.
    import openai

    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def ask(served: Served, status: int = 200, **body):
    return served.post(PATH, {"input": "Hello", "temperature": 0, "max_output_tokens": 16, **body}, status)


def text_of(answer: dict) -> str:
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    return message["content"][0]["text"]


def test_a_text_is_answered_with_a_message(served: Served):
    found = ask(served, max_output_tokens=4, ignore_eos=True)
    assert (found["object"], found["status"]) == ("response", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["role"] == "assistant"
    assert found["usage"]["output_tokens"] == 4
    chat = served.chat("Hello", max_tokens=4, ignore_eos=True)
    assert text_of(found) == chat["choices"][0]["message"]["content"]
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_items_and_instructions_make_the_conversation(served: Served):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is Rome?"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
        {"type": "message", "role": "user", "content": "And Oslo?"},
    ]
    found = ask(served, input=items, instructions="Be brief.", tools=FLAT)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is Rome?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "And Oslo?"},
    ]
    count = served.post("/tokenize", {"messages": messages, "tools": TOOLS})["count"]
    assert found["usage"]["input_tokens"] == count


def test_sampling_parameters_are_heard(served: Served):
    one = ask(served, temperature=1, seed=1)
    assert text_of(one) == text_of(ask(served, temperature=1, seed=1))
    assert text_of(one) != text_of(ask(served, temperature=1, seed=2))
    assert text_of(ask(served, temperature=4, seed=2, top_p=1e-6)) == text_of(ask(served))
    assert text_of(ask(served, logit_bias={"65": 100}, max_output_tokens=3)) == "AAA"


def test_effort_reaches_the_template(served: Served):
    plain = ask(served, max_output_tokens=1)["usage"]["input_tokens"]
    hard = ask(served, max_output_tokens=1, reasoning={"effort": "hard"})["usage"]["input_tokens"]
    assert hard == plain + len("Think hard.\n")
    assert ask(served, 400, chat_template_kwargs={"messages": 1})["error"]["param"] == "chat_template_kwargs.messages"


def test_a_format_is_kept_to(served: Served):
    wanted = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    found = ask(served, text=wanted, max_output_tokens=200, temperature=1, seed=1)
    assert found["status"] == "completed"
    assert set(json.loads(text_of(found))) == {"size", "good"}
    assert found["text"] == wanted
    some = ask(served, text={"format": {"type": "json_object"}})
    assert text_of(some).lstrip().startswith("{")


def test_a_required_call_is_an_item(served: Served):
    asked = {"tools": FLAT, "max_output_tokens": 300, "temperature": 1, "seed": 5}
    found = ask(served, **asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = found["output"]
    assert call["type"] == "function_call"
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    (named,) = ask(served, **asked, tool_choice={"type": "function", "name": "clock"})["output"]
    assert named["name"] == "clock"
    assert ask(served, **asked, tool_choice="none")["output"][0]["type"] == "message"


def test_a_call_that_a_stop_cuts_short_is_incomplete(served: Served):
    asked = {"tools": FLAT, "max_output_tokens": 300, "tool_choice": "required", "stop": ["Rome", "Oslo"]}
    streamed = served.events(PATH, {"input": "Hello", **asked})[-1]
    assert streamed["type"] == "response.incomplete"
    for found in (ask(served, **asked), streamed["response"]):
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "stop"})
        assert found["output"][-1]["type"] == "function_call"
        assert found["output"][-1]["status"] == "incomplete"


def test_a_forced_call_that_has_only_begun_is_no_text(served: Served):
    assert text_of(ask(served, tools=FLAT, tool_choice="required", max_output_tokens=4)) == ""


def test_a_form_that_leads_nowhere_is_the_clients_error():
    schema = {"type": "string", "pattern": "^(a?){500}a{500}$"}
    asked = {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    with serving(template=RICH, max_sequences=4) as server:
        failed = server.events(PATH, asked)[-1]
        refused = server.post(PATH, asked, 400)["error"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "invalid_request_error"
    assert failed["response"]["error"]["message"].startswith("text.format.schema")
    assert (refused["type"], refused["param"]) == ("invalid_request_error", "text.format.schema")


def test_cached_tokens_and_salts(served: Served):
    def cached(salt: str) -> int:
        return ask(served, input=LONG, cache_salt=salt)["usage"]["input_tokens_details"]["cached_tokens"]

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def test_logprobs_come_if_included(served: Served):
    assert ask(served)["output"][0]["content"][0]["logprobs"] == []
    found = ask(served, include=["message.output_text.logprobs"], top_logprobs=2)["output"][0]["content"][0]
    assert len(found["logprobs"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("field", "value"), [("previous_response_id", "resp_1"), ("background", True), ("truncation", "auto")]
)
def test_what_would_need_a_store_is_refused(served: Served, field, value):
    assert ask(served, 400, **{field: value})["error"]["param"] == field


def test_events_come_in_their_order(served: Served):
    events = served.events(PATH, {"input": "Hello", "temperature": 0, "max_output_tokens": 4, "ignore_eos": True})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    whole = ask(served, max_output_tokens=4, ignore_eos=True)
    assert "".join(event["delta"] for event in events[4:-4]) == text_of(whole)
    assert text_of(events[-1]["response"]) == text_of(whole)
    assert events[-1]["response"]["usage"] == whole["usage"]


def test_calls_have_events_of_their_own(served: Served):
    asked = {"input": "x", "tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
    events = served.events(PATH, {**asked, "max_output_tokens": 300})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2] == "output_item.added"
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    pieces = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(pieces) == events[-3]["arguments"] == events[-1]["response"]["output"][0]["arguments"]


def test_the_openai_client_reads_responses(client):
    asked = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created"
    # Eight tokens are rarely all that a model without sense has to say.
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_thoughts_and_calls_are_items():
    parser = output_parser("think", "hermes", TOOLS)
    events = Events("resp_x")
    found = events.take(parser.feed("<think>hm</think>Well. " + CALL) + parser.finish()) + events.end()
    assert [item["type"] for item in events.output] == ["reasoning", "message", "function_call"]
    assert events.output[2]["arguments"] == '{"city": "Rome"}'
    assert [kind for kind, _ in found if kind.endswith("output_item.done")] == ["response.output_item.done"] * 3


def test_a_tool_at_fault_is_named_as_the_client_knows_it(served: Served):
    schema: dict = {"type": "null"}
    for _ in range(40):
        schema = {"items": schema}
    for tool, field in (({"name": "a", "strict": True, "parameters": schema}, "parameters"), ({"name": "a b"}, "name")):
        error = ask(served, 400, tools=[{"type": "function", **tool}])["error"]
        assert error["param"] == f"tools[0].{field}"
        assert error["message"].startswith(f"tools[0].{field} ")
