"""Ollama's API: shapes on the wire, streams line by line, options, tools, formats, thinking. Tiny model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import CALL, RICH, SCHEMA, TOOLS
from weft.server.apis.ollama.answers import OllamaAnswer
from weft.server.settings import ServerSettings

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "options": {"temperature": 0}}
PROMPT = {"model": "tiny", "prompt": "Once upon", "raw": True, "options": {"temperature": 0, "num_predict": 12}}


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny"), template=RICH, max_sequences=8) as server:
        yield server


def lines(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def options(**more: Any) -> dict[str, Any]:
    return {"options": {"temperature": 0, "num_predict": 12, **more}}


def test_a_stream_is_lines_of_json_and_the_default(served: Served):
    found = lines(served, "/api/chat", ASKED | options())
    *pieces, last = found
    assert [each["done"] for each in found] == [False] * len(pieces) + [True]
    assert all(each["model"] == "tiny" and each["created_at"].endswith("Z") for each in found)
    whole = served.post("/api/chat", ASKED | options() | {"stream": False})
    assert "".join(each["message"]["content"] for each in pieces) == whole["message"]["content"] != ""
    assert whole["message"]["role"] == last["message"]["role"] == "assistant"
    same = served.chat(max_tokens=12)
    assert whole["message"]["content"] == same["choices"][0]["message"]["content"]
    for each in (last, whole):
        assert (each["done_reason"], each["eval_count"]) == ("length", 12)
        assert each["prompt_eval_count"] == same["usage"]["prompt_tokens"]
        times = [each[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")]
        assert times[0] >= times[3] > 0 == times[1]


def test_generate_continues_a_raw_prompt_and_answers_a_plain_one(served: Served):
    raw = served.post("/api/generate", PROMPT | {"stream": False})
    assert raw["response"] == served.complete(max_tokens=12)["choices"][0]["text"]
    assert "".join(each["response"] for each in lines(served, "/api/generate", PROMPT)) == raw["response"]
    plain = served.post("/api/generate", PROMPT | {"raw": False, "system": "Be brief.", "stream": False})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once upon"}]
    same = served.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12})
    assert plain["response"] == same["choices"][0]["message"]["content"]
    assert plain["prompt_eval_count"] == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("option", "value", "same"),
    [
        ("seed", 7, {"seed": 7, "temperature": 1}),
        ("top_k", 1, {}),
        ("top_p", 0, {}),
        ("min_p", 1.0, {"temperature": 1, "min_p": 1.0, "seed": 1}),
        ("repeat_penalty", 1.7, {"repetition_penalty": 1.7}),
        ("presence_penalty", 2.0, {"presence_penalty": 2.0}),
        ("frequency_penalty", 1.5, {"frequency_penalty": 1.5}),
        ("num_ctx", 2048, {}),
        ("repeat_last_n", 64, {}),
    ],
)
def test_options_mean_what_they_mean_elsewhere(served: Served, option, value, same):
    # Options that would need a temperature to show get one.
    given = {"temperature": same.get("temperature", 0), "num_predict": 24, option: value}
    if "seed" in same:
        given["seed"] = same["seed"]
    found = served.post("/api/chat", ASKED | {"options": given, "stream": False})
    expected = served.chat(max_tokens=24, **same)["choices"][0]["message"]["content"]
    assert found["message"]["content"] == expected
    if same and "temperature" not in same:
        assert expected != served.say(max_tokens=24)


def test_stops_end_the_answer(served: Served):
    plain = served.say(max_tokens=24)
    found = served.post("/api/chat", ASKED | options(num_predict=24, stop=plain[5]) | {"stream": False})
    assert found["message"]["content"] == plain[: plain.index(plain[5])]
    assert found["done_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "start"),
    [
        ({"options": {"num_ctx": 4096}}, "options.num_ctx is 4096"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 8}}, "options.repeat_last_n must be -1 or 0"),
        ({"options": {"mirostat": 1}}, "options.mirostat is not supported"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
        ({"options": {"stop": [""]}}, "options.stop must be strings"),
        ({"options": {"num_predict": 1 << 30}}, "options.num_predict must be from 0"),
        ({"options": {"temperature": -1}}, "options.temperature: "),
        ({"temperature": 0.5}, "temperature is not supported here; put it into options"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images are not supported"),
        ({"messages": [{"role": "user\n", "content": "x"}]}, "messages[0].role must be a word"),
        ({"format": "yaml"}, 'format must be "json" or a JSON schema'),
        ({"format": {"type": "nonsense"}}, "format "),
        ({"think": "hard"}, "think must be true, false or one of low, medium, high"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"truncate": True}, "truncate is not supported"),
        ({"model": None}, "model: "),
    ],
)
def test_what_cannot_be_served_is_refused_in_ollamas_form(served: Served, body, start):
    found = served.post("/api/chat", ASKED | body, 400)
    assert list(found) == ["error"]
    assert found["error"].startswith(start)


def test_an_unknown_model_is_not_found_and_a_tag_is_no_other_model(served: Served):
    assert "does not exist" in served.post("/api/chat", ASKED | {"model": "other"}, 404)["error"]
    assert served.post("/api/chat", ASKED | options() | {"model": "tiny:latest", "stream": False})["model"] == "tiny"


def test_a_prompt_that_is_missing_only_asks_to_load(served: Served):
    loaded = served.post("/api/generate", {"model": "tiny"})
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    unloaded = served.post("/api/chat", {"model": "tiny", "messages": [], "keep_alive": 0})
    assert unloaded["done_reason"] == "unload"
    assert served.post("/api/chat", ASKED | options() | {"stream": False, "keep_alive": "5m"})["done"]


def test_a_format_is_followed(served: Served):
    found = served.post("/api/chat", ASKED | options(num_predict=60) | {"format": SCHEMA, "stream": False})
    assert set(json.loads(found["message"]["content"])) == {"size", "good"}
    body = {**PROMPT, "format": {"const": "yes"}, "options": {"temperature": 0, "num_predict": 60}}
    streamed = lines(served, "/api/generate", body)
    assert json.loads("".join(each["response"] for each in streamed)) == "yes"


def test_a_tool_call_is_one_line_with_its_arguments_as_an_object(served: Served, monkeypatch):
    # The tiny model calls no tool by itself.
    def forced(self: OllamaAnswer, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.turn._forced, self.turn._only = True, "weather"

    begin = OllamaAnswer.__init__
    monkeypatch.setattr(OllamaAnswer, "__init__", forced)
    body = ASKED | options(num_predict=200) | {"tools": TOOLS}
    found = lines(served, "/api/chat", body)
    calls = [call for each in found for call in each["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [{"name": "weather", "arguments": calls[0]["function"]["arguments"]}]
    assert calls[0]["function"]["arguments"]["city"] in ("Rome", "Oslo")
    whole = served.post("/api/chat", body | {"stream": False})
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [call["function"] for call in calls]


def test_earlier_tool_calls_and_their_results_reach_the_template(served: Served):
    call = json.loads(CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [{"function": call}]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    called = {"type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
    same = [history[0], {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "sunny"}]
    found = served.post("/api/chat", ASKED | options() | {"messages": history, "tools": TOOLS, "stream": False})
    openai = served.post("/v1/chat/completions", {"messages": same, "tools": TOOLS, "temperature": 0, "max_tokens": 12})
    assert found["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    assert found["message"]["content"] == openai["choices"][0]["message"]["content"]


def test_thinking_is_separate_and_may_be_turned_off(served: Served):
    body = ASKED | options(num_predict=200) | {"think": True, "format": {"const": "ok"}, "stream": False}
    # The tiny model closes its reasoning only if it must say nothing else.
    found = served.post("/api/chat", body | {"think": False})["message"]
    assert (found["content"], "thinking" in found) == ('"ok"', False)
    plain = served.post("/api/chat", ASKED | options() | {"think": "low", "stream": False})
    assert plain["message"]["thinking"]
    assert plain["message"]["content"] == ""
    streamed = lines(served, "/api/chat", ASKED | options() | {"think": "low"})
    assert "".join(each["message"].get("thinking", "") for each in streamed) == plain["message"]["thinking"]


def test_log_probabilities_come_with_their_tokens(served: Served):
    body = ASKED | options(num_predict=3) | {"logprobs": True, "top_logprobs": 2}
    whole = served.post("/api/chat", body | {"stream": False})["logprobs"]
    assert len(whole) == 3
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 2 for each in whole)
    assert [each for line in lines(served, "/api/chat", body) for each in line.get("logprobs", ())] == whole


def test_models_are_listed_and_described(served: Served):
    [tag] = served.client.get("/api/tags").json()["models"]
    assert tag["name"] == tag["model"] == "tiny"
    assert tag["size"] > 0
    assert len(tag["digest"]) == 64
    [loaded] = served.client.get("/api/ps").json()["models"]
    assert loaded["digest"] == tag["digest"]
    assert loaded["context_length"] == 2048
    shown = served.post("/api/show", {"model": "tiny", "verbose": True})
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == RICH
    assert shown["model_info"][f"{shown['details']['family']}.context_length"] == 2048
    assert served.post("/api/show", {"name": "other"}, 404)["error"]
    assert served.client.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(("method", "name"), [("POST", "pull"), ("POST", "create"), ("DELETE", "delete")])
def test_nothing_is_downloaded_or_changed(served: Served, method, name):
    found = served.client.request(method, f"/api/{name}", json={"model": "llama3"})
    assert found.status_code == 501
    assert found.json()["error"].startswith("models are chosen when the server starts")


def test_an_error_in_the_middle_is_a_line(served: Served, monkeypatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(OllamaAnswer, "_end", broken)
    assert lines(served, "/api/chat", ASKED | options())[-1] == {"error": "internal error; see the server's log"}


def test_keys_guard_these_routes_too():
    with serving(ServerSettings(api_keys=("k",), model_name="tiny")) as server:
        refused = httpx.get(server.url + "/api/tags")
        assert refused.status_code == 401
        assert "API key" in refused.json()["error"]
        assert server.client.get("/api/tags").status_code == 200
