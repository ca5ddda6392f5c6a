"""Anthropic's API, /v1/messages: blocks in, blocks out, events in their prescribed order, its client. Tiny model."""

from __future__ import annotations

import json

import httpx
import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import LIMITS, LONG, RICH, SCHEMA, TOOLS
from tests.support.texts import texts
from weft.base.errors import EngineStopped, RequestError
from weft.server.apis import delivery
from weft.server.apis.anthropic_events import SIGNATURE, Blocks
from weft.server.generation import Generation
from weft.server.http.errors import INTERNAL, STOPPED, anthropic_error
from weft.server.http.sse import Silence
from weft.server.settings import ServerSettings
from weft.text.answer_parts import AnswerPart
from weft.text.output import output_parser

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
THEIRS = [
    {"name": tool["function"]["name"], "description": "for tests", "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]
USER = [{"role": "user", "content": "Hello"}]
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny", tool_parser="hermes"), template=RICH, max_sequences=16) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served):
    # Its import takes seconds.
    import anthropic

    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


def ask(served: Served, status: int = 200, **body):
    return served.post(PATH, {"messages": USER, "temperature": 0, "max_tokens": 16, **body}, status)


def text_of(message: dict) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def streamed(served: Served, **body) -> list[tuple[str, dict]]:
    """Return the named events of a stream."""
    found = []
    sent = {"messages": USER, "temperature": 0, "max_tokens": 16, "stream": True, **body}
    with served.client.stream("POST", PATH, json=sent) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        assert name.startswith("event: ")
        found.append((name[7:], json.loads(data[6:])))
    assert all(name == data["type"] for name, data in found)
    return found


# answers --------------------------------------------------------------------------------------------------------------


def test_both_apis_give_the_same_answer(served: Served):
    found, chat = ask(served), served.chat("Hello")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert text_of(found) == chat["choices"][0]["message"]["content"]
    usage = found["usage"]
    read = usage["cache_read_input_tokens"]
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] + read == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_a_conversation_of_blocks_is_that_of_the_chat_api(served: Served):
    called = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = served.post(
        "/tokenize",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "How is Rome?\n\nToday?"},
                {"role": "assistant", "content": "Let me see.", "tool_calls": [called], "reasoning_content": "Hm."},
                {"role": "tool", "content": "Error: rain", "tool_call_id": "t1"},
                {"role": "user", "content": "Why?"},
            ],
            "tools": TOOLS,
            "chat_template_kwargs": {"enable_thinking": True},
        },
    )
    body = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": "How is Rome?"},
            {"role": "user", "content": [{"type": "text", "text": "Today?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "rain", "is_error": True},
                    {"type": "text", "text": "Why?"},
                ],
            },
        ],
        "tools": THEIRS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    assert served.post(COUNT, body) == {"input_tokens": chat["count"]}
    # The answer's prompt is the one that was counted.
    usage = ask(served, **body)["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[part] for part in parts) == chat["count"]


@pytest.mark.thorough
def test_a_large_body_is_read_by_a_worker_with_the_same_result(served: Served):
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{**THEIRS[0], "description": "x" * 1000}]}
    small = served.post(COUNT, body)["input_tokens"]
    padded = {**body, "metadata": {"user_id": "x" * 40_000}}
    assert served.post(COUNT, padded)["input_tokens"] == small
    answer = ask(served, **padded)
    usage = answer["usage"]
    assert sum(usage[key] for key in usage if key.endswith("input_tokens")) == small


def test_why_an_answer_ended_is_reported(served: Served):
    text = text_of(ask(served))
    assert ask(served)["stop_reason"] == "max_tokens"
    stop = next(each for each in text[1:] if each.strip() and ord(each) < 128)
    found = ask(served, stop_sequences=[stop])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert text_of(found) == text[: text.index(stop)]
    said = ask(served, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=100)
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)
    assert set(json.loads(text_of(said))) == {"size", "good"}


def test_an_answer_ends_where_the_context_ends():
    with serving(ServerSettings(), template=RICH, max_length=256, max_sequences=2) as server:
        found = ask(server, max_tokens=5000)
        assert found["stop_reason"] == "model_context_window_exceeded"
        long = [{"role": "user", "content": "x" * 300}]
        assert "too long" in ask(server, 400, messages=long)["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"weather", "clock"}), ({"type": "tool", "name": "clock"}, {"clock"})],
)
def test_a_forced_tool_is_called(served: Served, choice, names):
    found = ask(served, tools=THEIRS, tool_choice={**choice, "disable_parallel_tool_use": True}, max_tokens=200)
    (block,) = found["content"]
    assert (found["stop_reason"], block["type"]) == ("tool_use", "tool_use")
    assert block["name"] in names
    assert block["input"]["city"] in ("Rome", "Oslo")
    # No tools: the model does not see them.
    none = served.post(COUNT, {"messages": USER, "tools": THEIRS, "tool_choice": {"type": "none"}})
    assert none == served.post(COUNT, {"messages": USER})


def test_a_call_that_was_cut_short_has_no_input_and_is_not_made(served: Served):
    found = ask(served, tools=THEIRS, tool_choice={"type": "any"}, max_tokens=60)
    assert found["stop_reason"] == "max_tokens"
    assert found["content"][-1]["input"] == {}


def test_thinking_is_returned_as_blocks(served: Served):
    """The template opens the reasoning if thinking is enabled; a stop sequence closes nothing, so all of it is one."""
    found = ask(served, thinking={"type": "enabled", "budget_tokens": 1024})
    (block,) = found["content"]
    assert (block["type"], block["signature"]) == ("thinking", SIGNATURE)
    assert block["thinking"]
    assert found["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    hidden = ask(served, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert hidden["content"] == [{"type": "thinking", "thinking": "", "signature": SIGNATURE}]
    for mode in ("disabled", "adaptive"):
        assert ask(served, thinking={"type": mode})["content"][0]["type"] == "text"


def test_usage_separates_what_was_read_from_what_was_written(served: Served):
    system = [{"type": "text", "text": "Mark this. " + LONG * 2, **CACHED}]
    first = ask(served, system=system)["usage"]
    assert first["cache_read_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] >= 448
    second = ask(served, system=system, messages=[{"role": "user", "content": "Something else"}])["usage"]
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert second["cache_creation_input_tokens"] == 0
    plain = ask(served, system="Unmarked. " + LONG)["usage"]
    assert plain["cache_creation_input_tokens"] == 0
    assert plain["input_tokens"] > 256


@pytest.mark.parametrize(
    "body",
    [
        {"cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"tools": [{**THEIRS[0], **CACHED}], "system": "x"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG, **CACHED}]}]},
    ],
)
def test_breakpoints_may_be_anywhere(served: Served, body):
    long = [{"role": "user", "content": "Where? " + LONG}]
    usage = ask(served, **{"messages": long, **body})["usage"]
    assert usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"] >= 64


# streams --------------------------------------------------------------------------------------------------------------


def test_events_come_in_the_prescribed_order_and_add_up_to_the_answer(served: Served):
    whole = ask(served, tools=THEIRS, tool_choice={"type": "any"}, max_tokens=200)
    events = streamed(served, tools=THEIRS, tool_choice={"type": "any"}, max_tokens=200)
    assert [name for name, _ in events[:2]] == ["message_start", "content_block_start"]
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    blocks: list[dict] = []
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append({**data["content_block"], "grown": ""})
        elif name == "content_block_delta":
            assert data["delta"]["type"] == "input_json_delta"
            blocks[-1]["grown"] += data["delta"]["partial_json"]
        else:
            assert name == "content_block_stop"
    assert [json.loads(block["grown"]) for block in blocks] == [block["input"] for block in whole["content"]]
    assert [block["name"] for block in blocks] == [block["name"] for block in whole["content"]]


def test_every_kind_of_block_has_its_own_deltas():
    parser = output_parser("think", "hermes")
    text = '<think>Hm.</think>Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    blocks = Blocks()
    events = blocks.take([part for character in text for part in parser.feed(character)] + parser.finish())
    events += blocks.end()
    kinds = [data["delta"]["type"] if "delta" in data else name for name, data in events]
    order = list(dict.fromkeys(kinds))
    assert order[:4] == ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
    assert order[4:] == ["text_delta", "input_json_delta"]
    assert [block["type"] for block in blocks.content] == ["thinking", "text", "tool_use"]
    assert blocks.called
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]


def test_arguments_that_are_no_object_make_no_call():
    for arguments in ('{"a": NaN}', '{"a" 1}', "[1]", '{"a": '):
        broken = Blocks()
        broken.take([AnswerPart("tool_call", arguments, 0, "id", "f")])
        broken.end()
        assert (bytes(broken.content[0]["input"]), broken.called) == (b"{}", False)


def test_silence_is_filled_with_pings(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Every stream of this API begins with a ping here, because its silence does."""

    class Filled(Silence):
        async def fill(self, send):
            await send({"type": "http.response.body", "body": self.event, "more_body": True})

    monkeypatch.setattr(delivery, "Silence", Filled)
    assert ("ping", {"type": "ping"}) in streamed(served)


def test_an_error_within_a_stream_is_an_event(served: Served, monkeypatch: pytest.MonkeyPatch):
    """A stream that has begun cannot change its status."""
    import anthropic

    def fails(generation, piece):
        raise EngineStopped("secret")

    monkeypatch.setattr(Generation, "check", fails)
    events = streamed(served)
    assert [name for name, _ in events] == ["message_start", "error"]
    assert events[1][1]["error"] == {"type": "api_error", "message": STOPPED}
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        stream = client.messages.create(model="tiny", max_tokens=4, messages=USER, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="engine has stopped"):
            list(stream)


def test_statuses_are_those_of_the_api():
    assert anthropic_error(RequestError("too many bodies", 503))[0] == 529
    assert anthropic_error(EngineStopped("x"))[0] == 503
    assert anthropic_error(ValueError("secret"))[1].error.message == INTERNAL


# errors ---------------------------------------------------------------------------------------------------------------


RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *USER]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *USER]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, *USER]}, "messages[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": ["a"] * 20}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"name": "a", "input_schema": {}, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": THEIRS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": THEIRS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(served: Served, body, field):
    answer = ask(served, 400, **body)
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert field in answer["error"]["message"], answer


def test_a_strict_schema_that_cannot_be_enforced_is_named_as_the_client_knows_it(served: Served):
    schema: dict = {"type": "null"}
    for _ in range(40):
        schema = {"items": schema}
    deep = {"name": "a", "strict": True, "input_schema": schema}
    assert ask(served, 400, tools=[deep])["error"]["message"].startswith("tools[0].input_schema is nested")


def test_errors_have_the_shape_of_the_api_from_every_layer():
    settings = ServerSettings(api_keys=("secret",), limits=LIMITS)
    with serving(settings, template=RICH, max_sequences=2) as server:
        for path, headers, body, status, kind in [
            (PATH, {}, b"{}", 401, "authentication_error"),
            (PATH, {"x-api-key": "wrong"}, b"{}", 401, "authentication_error"),
            (PATH, {"x-api-key": "secret", "origin": "http://evil"}, b"{}", 403, "permission_error"),
            (PATH + "/other", {"x-api-key": "secret"}, b"{}", 404, "not_found_error"),
            (PATH, {"x-api-key": "secret"}, b"{", 400, "invalid_request_error"),
            (PATH, {"x-api-key": "secret"}, b"x" * (1 << 17), 413, "request_too_large"),
            (PATH, {"x-api-key": "secret"}, json.dumps({"model": "x", "max_tokens": 1, "messages": USER}).encode(), 404,
             "not_found_error"),
        ]:  # fmt: skip
            found = httpx.post(server.url + path, headers=headers, content=body)
            assert (found.status_code, found.json()["error"]["type"]) == (status, kind), found.text
            assert found.json()["type"] == "error"
            assert found.headers["request-id"] == found.headers["x-request-id"]
        good = {"messages": USER, "max_tokens": 2}
        version = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        assert httpx.post(server.url + PATH, headers=version, json=good).status_code == 200
        # Other routes keep OpenAI's shape.
        assert "param" in httpx.post(server.url + "/v1/completions").json()["error"]


def test_a_busy_server_is_overloaded_and_a_limited_key_is_over_its_rate():
    assert anthropic_error(RequestError("busy", 429))[0] == 529
    limited = RequestError("slow down", 429, code="rate_limit_exceeded")
    assert anthropic_error(limited)[0] == 429
    assert anthropic_error(limited)[1].error.type == "rate_limit_error"


words = texts(max_size=8)
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "other"])},
    optional={
        "text": words,
        "thinking": words,
        "id": words,
        "name": words,
        "input": st.dictionaries(words, st.none() | words, max_size=2),
        "tool_use_id": words,
        "content": words | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2),
        "is_error": st.booleans(),
        "cache_control": st.just({"type": "ephemeral"}),
    },
)
bodies = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant"]), "content": words | st.lists(blocks, max_size=4)}
            ),
            max_size=4,
        ),
        "max_tokens": st.integers(1, 3),
    },
    optional={
        "system": words | st.lists(blocks, max_size=2),
        "tools": st.just(THEIRS) | st.lists(st.fixed_dictionaries({"name": words, "input_schema": st.just({})})),
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "tool", "none"])}, optional={"name": st.just("clock")}
        ),
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled", "adaptive"])}),
        "stop_sequences": st.lists(words, max_size=2),
        "cache_control": st.just({"type": "ephemeral"}),
        "stream": st.booleans(),
    },
)


@given(body=bodies)
@hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
def test_no_body_breaks_the_server(served: Served, body):
    """Bodies that are nearly right, or right: each is answered, or refused in the form of the API."""
    answer = served.client.post(PATH, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400), answer.text
    assert answer.status_code == 200 or answer.json()["type"] == "error"
    counted = {key: value for key, value in body.items() if key not in ("max_tokens", "stream", "stop_sequences")}
    count = served.client.post(COUNT, content=json.dumps(counted).encode()).status_code
    assert count == 200 or answer.status_code == 400


# the client -----------------------------------------------------------------------------------------------------------


def test_the_client_holds_a_conversation_with_a_tool(client):
    """Ask, get a call, return its result, get an answer."""
    asked = {"model": "tiny", "max_tokens": 200, "tools": THEIRS, "extra_body": {"temperature": 0}}
    first = client.messages.create(messages=USER, tool_choice={"type": "tool", "name": "weather"}, **asked)
    (call,) = first.content
    assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    history = [*USER, {"role": "assistant", "content": [block.model_dump() for block in first.content]}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    second = client.messages.create(
        messages=[*history, {"role": "user", "content": [result]}], **{**asked, "max_tokens": 8}
    )
    assert second.content[0].type == "text"
    assert second.usage.input_tokens > 0
    counted = client.messages.count_tokens(model="tiny", messages=USER, system="Be brief.")
    assert counted.input_tokens > client.messages.count_tokens(model="tiny", messages=USER).input_tokens


def test_the_client_streams_text_thinking_and_tools(client):
    asked = {"model": "tiny", "max_tokens": 24, "messages": USER, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 24
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    with client.messages.stream(thinking={"type": "enabled", "budget_tokens": 1024}, **asked) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking"]
    assert final.content[0].signature == SIGNATURE
    choice = {"type": "tool", "name": "clock", "disable_parallel_tool_use": True}
    with client.messages.stream(**{**asked, "max_tokens": 200, "tools": THEIRS, "tool_choice": choice}) as stream:
        final = stream.get_final_message()
    assert final.content[0].input["city"] in ("Rome", "Oslo")


def test_the_client_raises_its_own_exceptions(served: Served, client):
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=USER)
    assert missing.value.request_id
    assert missing.value.type == "not_found_error"
    content = [{"type": "image", "source": {"type": "url", "url": served.url + "/x.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="only text is supported"):
        client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": content}])
    with serving(ServerSettings(model_name="tiny", api_keys=("secret",)), template=RICH) as server:
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(
                model="tiny", max_tokens=1, messages=USER
            )
        for key in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            found = anthropic.Anthropic(base_url=server.url, max_retries=0, **key)
            assert found.messages.create(model="tiny", max_tokens=1, messages=USER).usage.output_tokens == 1


def test_a_ttl_retains_what_is_before_its_mark(served: Served):
    marked = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": [marked, {"type": "text", "text": "Why?"}]}]}
    before = served.stats()["retained"]["tokens"]
    served.post(PATH, body)
    retained = served.stats()["retained"]["tokens"] - before
    assert retained > 0
    assert served.post(PATH, {**body, "retain": 0})["usage"]["cache_read_input_tokens"] >= retained
    assert served.stats()["retained"]["tokens"] == before
    marked["cache_control"]["ttl"] = "soon"
    assert "5m or 1h" in served.post(PATH, body, 400)["error"]["message"]
