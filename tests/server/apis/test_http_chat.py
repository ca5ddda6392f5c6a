"""Chat through a real socket: forms of answers, tools, thoughts, reuse and order. Tiny model."""

from __future__ import annotations

import json
import threading

import pytest

from tests.support.servers.held_steps import HeldSteps, wait_until
from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import CALL, LONG, PATH, RICH, SCHEMA, TOOLS, saying
from weft.server.settings import ServerSettings


@pytest.fixture(scope="module")
def served():
    settings = ServerSettings(model_name="tiny")
    with serving(settings, template=RICH, max_sequences=16, capture_every=1 << 20) as server:
        yield server


# forms of answers -----------------------------------------------------------------------------------------------------


def test_an_answer_follows_a_schema(served: Served):
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    found = json.loads(served.say(response_format=wanted, max_tokens=200, temperature=1, seed=1))
    assert isinstance(found["good"], bool)
    assert 0 <= found["size"] <= 99


def test_a_json_object_is_one(served: Served):
    found = served.chat(response_format={"type": "json_object"}, max_tokens=24, temperature=1, seed=1)
    assert found["choices"][0]["message"]["content"].lstrip().startswith("{")
    assert not served.say(response_format={"type": "text"}).lstrip().startswith("{")


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"regex": "[0-9]{3}-[a-c]"}, lambda text: text[:3].isdigit() and text[3] == "-" and text[4] in "abc"),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"size", "good"}),
        ({"grammar": 'start: "up" | "down"'}, lambda text: text in ("up", "down")),
    ],
)
def test_other_forms_are_kept_to(served: Served, form, fits):
    text = served.say(structured_outputs=form, max_tokens=200, temperature=1, seed=4)
    assert fits(text), text
    if "json" not in form:  # whose white space may go on for as long as a model without sense likes
        assert served.complete(structured_outputs=form, max_tokens=200)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"guided_regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_json": {"const": 7}}, lambda text: json.loads(text) == 7),
        ({"guided_json": '{"const": 7}'}, lambda text: json.loads(text) == 7),
        ({"guided_grammar": 'start: "up" | "down"'}, lambda text: text in ("up", "down")),
        ({"guided_grammar": 'root ::= "up" | down\ndown ::= "do" [w] "n"'}, lambda text: text in ("up", "down")),
        ({"regex": "[a-c]{5}"}, lambda text: len(text) == 5 and set(text) <= set("abc")),
        ({"ebnf": 'root ::= [0-9] "x"'}, lambda text: text[0].isdigit() and text[1:] == "x"),
        ({"structured_outputs": {"grammar": 'root ::= "a" "b"'}}, lambda text: text == "ab"),
    ],
)
def test_forms_in_other_servers_spelling_are_kept_to(served: Served, form, fits):
    assert fits(served.say(max_tokens=100, temperature=1, seed=3, **form)), form
    assert fits(served.complete(max_tokens=100, **form)["choices"][0]["text"]), form


def test_json_has_space_but_not_without_end(served: Served):
    """A model without sense, bent towards spaces, comes to an end all the same."""
    bias = {str(token): 100 for token in b" \n\t\r"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice = served.chat(response_format=form, logit_bias=bias, max_tokens=1000)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"size", "good"}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"regex": "(a?){500}a{500}"}, "regex"),
        ({"structured_outputs": {"grammar": 'start: "a" start'}}, "structured_outputs.grammar"),
    ],
)
def test_a_form_that_leads_nowhere_is_the_clients_error(form, param):
    """It compiles, and fails while it is followed; a grammar that was met before may fail sooner."""
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, **form}
    with serving(template=RICH, max_sequences=4) as server:
        streamed = server.events(PATH, asked)[-1]["error"]
        whole = [server.post(PATH, asked, 400)["error"] for _ in range(2)]
    for error in (streamed, *whole):
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"].startswith(param)
        assert "non-verbose" not in error["message"]


def test_an_answer_in_a_channel_follows_its_form_there():
    with serving(ServerSettings(reasoning_parser="harmony"), max_sequences=4) as server:
        message = server.chat(response_format={"type": "json_object"}, max_tokens=60, return_token_ids=True)
        text = bytes(message["choices"][0]["token_ids"]).decode()
        assert text.startswith(("<|channel|>final<|message|>", "<|channel|>analysis<|message|>"))


# tools and thoughts ---------------------------------------------------------------------------------------------------


def test_a_call_is_told_from_the_rest(served: Served):
    message = served.chat(**saying("I look. " + CALL), tools=TOOLS)["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    assert message["message"]["content"] == "I look."
    (call,) = message["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_without_tools_or_with_choice_none_nothing_is_a_call(served: Served):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = served.chat(**saying(CALL), **more)["choices"][0]["message"]
        assert "tool_calls" not in message
        assert message["content"].startswith("<tool_call>")


def test_tools_reach_the_prompt_unless_there_is_no_choice(served: Served):
    plain = served.chat(max_tokens=1)["usage"]["prompt_tokens"]
    assert served.chat(max_tokens=1, tools=TOOLS)["usage"]["prompt_tokens"] > plain
    assert served.chat(max_tokens=1, tools=TOOLS, tool_choice="none")["usage"]["prompt_tokens"] == plain


def test_a_required_call_is_made(served: Served):
    found = served.chat(
        tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400, temperature=1, seed=2
    )["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    for call in found["message"]["tool_calls"]:
        assert call["function"]["name"] in ("weather", "clock")
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_named_tool_is_called(served: Served):
    choice = {"type": "function", "function": {"name": "clock"}}
    asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "temperature": 1, "seed": 2}
    (call,) = served.chat(**asked)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_parallel_calls_can_be_refused(served: Served):
    asked = {**saying(CALL + CALL), "tools": TOOLS}
    both = served.chat(**asked)["choices"][0]["message"]["tool_calls"]
    one = served.chat(**asked, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
    assert (len(both), len(one)) == (2, 1)


def test_a_conversation_with_calls_is_taken(served: Served):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "Rome?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    found = served.post(PATH, {"messages": messages, "tools": TOOLS, "max_tokens": 2, "return_token_ids": True})
    prompt = served.post("/detokenize", {"tokens": found["prompt_token_ids"]})["prompt"]
    assert "<|start|>system\nBe brief." in prompt
    assert "How is Rome?" in prompt
    assert '"arguments": {"city": "Rome"}' in prompt


def test_calls_stream_as_name_then_arguments(served: Served, monkeypatch):
    served.pace(monkeypatch)
    # Drafts would bring all that the grammar forces at once.
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "temperature": 0, "draft": False}
    events = served.events(PATH, {**body, **saying("Well. " + CALL)})
    pieces = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", [])]
    assert pieces[0]["function"]["name"] == "weather"
    assert pieces[0]["id"]
    assert all("name" not in piece["function"] and "id" not in piece for piece in pieces[1:])
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"city": "Rome"}
    assert len(pieces) > 3
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def finish_and_text(events: list) -> tuple[str, str]:
    """Why a stream has ended, and its content."""
    choices = [choice for event in events for choice in event["choices"]]
    return choices[-1]["finish_reason"], "".join(each["delta"].get("content", "") for each in choices)


@pytest.mark.parametrize(("stop", "finish"), [("Rome", "stop"), ("</tool_call>", "tool_calls")])
def test_a_call_that_a_stop_cuts_short_was_not_made(served: Served, stop, finish):
    asked = {"tools": TOOLS, "stop": [stop], **saying(CALL)}
    choice = served.chat(**asked)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    events = served.events(PATH, {"messages": [{"role": "user", "content": "x"}], **asked})
    assert finish_and_text(events) == (finish, "")


@pytest.mark.parametrize(
    ("fields", "finish"), [({"max_tokens": 4}, "length"), ({"stop": ["name"], "max_tokens": 60}, "stop")]
)
def test_a_forced_call_that_has_only_begun_is_no_text(served: Served, fields, finish):
    asked = {"tools": TOOLS, "tool_choice": "required", **fields}
    choice = served.chat(**asked)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == (finish, "")
    events = served.events(PATH, {"messages": [{"role": "user", "content": "x"}], **asked})
    assert finish_and_text(events) == (finish, "")


def test_thoughts_are_told_apart(served: Served):
    asked = saying("<think>hm, so</think>It is.")
    found = served.chat(**asked)
    assert found["choices"][0]["message"]["reasoning_content"] == "hm, so"
    assert found["choices"][0]["message"]["content"] == "It is."
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm, so")
    hidden = served.chat(**asked, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    events = served.events(PATH, {"messages": [{"role": "user", "content": "x"}], **asked})
    said = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(each.get("reasoning_content", "") for each in said) == "hm, so"
    assert "".join(each.get("content", "") for each in said) == "It is."


def test_template_variables_reach_the_template_under_all_names_but_its_own(served: Served):
    plain = served.chat(max_tokens=1)["usage"]["prompt_tokens"]
    thinking = served.chat(max_tokens=1, chat_template_kwargs={"enable_thinking": True})["usage"]["prompt_tokens"]
    assert thinking == plain + len("<think>\n")
    effort = served.chat(max_tokens=1, reasoning_effort="hard")["usage"]["prompt_tokens"]
    assert effort == plain + len("Think hard.\n")
    # The prompt has opened the thoughts, so the answer begins within them.
    # A grammar of ours is taken as it stands; other forms of the answer apply behind the thoughts.
    written = {"structured_outputs": {"grammar": 'start: "so</think>Yes"'}, "max_tokens": 40}
    found = served.chat(**written, chat_template_kwargs={"enable_thinking": True})
    assert found["choices"][0]["message"]["reasoning_content"] == "so"
    for name in ("messages", "tools", "add_generation_prompt", "eos_token", "range", "raise_exception"):
        error = served.chat(chat_template_kwargs={name: "x"}, status=400)["error"]
        assert error["param"] == f"chat_template_kwargs.{name}"


# reuse and order ------------------------------------------------------------------------------------------------------


def cached(answer: dict) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_usage_tells_what_was_cached_and_why_not_more(served: Served):
    first = served.complete(LONG, cache_salt="usage")
    assert cached(first) == 0
    assert first["usage"]["prompt_tokens_details"]["miss"]["reason"] == "never_computed"
    again = served.complete(LONG, cache_salt="usage")
    assert cached(again) == (len(LONG) - 1) // 64 * 64
    assert again["usage"]["prompt_tokens_details"]["miss"]["reason"] == "nothing_more"
    assert again["choices"] == first["choices"]


def test_another_salt_meets_nothing(served: Served):
    served.complete(LONG, cache_salt="mine")
    other = served.complete(LONG, cache_salt="yours")
    assert cached(other) == 0
    assert other["usage"]["prompt_tokens_details"]["miss"]["reason"] == "never_computed"
    assert cached(served.complete(LONG, cache_salt="mine")) > 0


@pytest.mark.parametrize("place", ["message", "part"])
def test_cache_control_declares_what_later_prompts_share(served: Served, place):
    def ask(question: str, salt: str, declared: bool) -> int:
        mark = {"cache_control": {"type": "ephemeral"}} if declared else {}
        if place == "message":
            first = [{"role": "system", "content": LONG, **mark}, {"role": "user", "content": question * 70}]
        else:
            parts = [{"type": "text", "text": LONG, **mark}, {"type": "text", "text": question * 70}]
            first = [{"role": "user", "content": parts}]
        return cached(served.post(PATH, {"messages": first, "max_tokens": 1, "cache_salt": salt}))

    for declared in (True, False):
        salt = f"{place} {declared}"
        assert ask("a", salt, declared) == 0
        shared = ask("b", salt, declared)
        # Where a message ends is known without being declared.
        assert (shared >= len(LONG) // 64 * 64) is (declared or place == "message"), shared


def test_a_lower_priority_number_goes_first(monkeypatch):
    steps, threads = HeldSteps(monkeypatch), []
    steps.hold()
    with serving(max_sequences=1) as server:
        # The first runs when the others come; these come one after the other.
        for priority in (0, 7, 0, -3):
            wishes = {"max_tokens": 2, "priority": priority, "ignore_eos": True}
            threads.append(threading.Thread(target=server.complete, args=("x",), kwargs=wishes))
            threads[-1].start()
            steps.wait_held()
            wait_until(lambda: server.backend.open == len(threads))
        steps.release()
        for thread in threads:
            thread.join()
        assert steps.ended == [0, 3, 2, 1]
