"""Conversations with functions: what is called was listed, its arguments fit the schema and stand in the question."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from weft_training import calls
from weft_training.dialogues import rendered

KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
DRAWN = 600


@pytest.fixture(scope="module")
def conversations():
    return [calls.conversation(Random(seed)) for seed in range(DRAWN)]


def called_in(messages):
    return [call["function"] for message in messages for call in message.get("tool_calls", [])]


def test_calls_fit_the_schema_that_was_listed(conversations):
    for messages, tools in conversations:
        listed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        assert len(listed) == len(tools)
        for call in called_in(messages):
            schema, arguments = listed[call["name"]], json.loads(call["arguments"])
            assert list(arguments) == schema["required"]
            for name, value in arguments.items():
                kind = schema["properties"][name]
                assert isinstance(value, KINDS[kind["type"]])
                assert value in kind.get("enum", [value])


def test_arguments_stand_in_the_question_and_results_in_the_answer(conversations):
    for messages, _ in conversations:
        for at, message in enumerate(messages):
            for call in called_in([message]):
                said = messages[at - 1]["content"].lower()
                for value in json.loads(call["arguments"]).values():
                    assert isinstance(value, bool) or str(value).lower().rstrip(".") in said, (said, call)
                for value in json.loads(messages[at + 1]["content"]).values():
                    answer = messages[at + 2]["content"].lower()
                    found = isinstance(value, bool) or str(value).lower() in answer
                    assert found or len(json.loads(messages[at + 1]["content"])) > 1, (value, answer)


def test_sums_and_units_are_right():
    for key in ("add", "multiply", "units"):
        for seed in range(50):
            each = calls.ask(Random(seed), calls.function(Random(seed), key))
            *given, result = [*each.arguments.values(), *each.result.values()]
            wanted = {"add": sum(given), "multiply": given[0] * given[-1], "units": round(given[0] * 2.54, 2)}[key]
            assert result == wanted


def test_weather_and_ways_can_be_so():
    for seed in range(400):
        values, _ = calls.drawn(Random(seed), "weather")
        assert values["sky"] != "snowy" or values["degrees"] <= 1, values
        assert values["city"] not in ("Cairo", "Nairobi") or values["sky"] != "snowy"
        values, _ = calls.drawn(Random(seed), "directions")
        assert 40 <= values["kilometres"] <= 600
        assert values["mode"] != "car" or values["duration"] < values["kilometres"]


def test_some_questions_need_no_function(conversations):
    share = sum(not called_in(messages) for messages, _ in conversations) / DRAWN
    assert 0.1 < share < 0.2
    assert sum(len(called_in(messages)) > 1 for messages, _ in conversations) > DRAWN / 20


def test_functions_and_names_are_many(conversations):
    assert len(calls.keys()) >= 25
    names = {tool["function"]["name"] for _, tools in conversations for tool in tools}
    assert len(names) > 150
    assert {len(tools) for _, tools in conversations} == {1, 2, 3, 4}
    assert len({json.dumps(each) for each in conversations}) == DRAWN


def test_every_form_names_the_arguments_and_answers_know_their_words():
    for key, entry in calls.entries().items():
        base = calls.entries()[entry.get("like", key)]
        for form in [*entry["said"], *entry.get("again", [])]:
            assert set(base["parameters"]) <= calls.words_of(form), (key, form)
        for form in entry["answers"]:
            assert calls.words_of(form) <= {*base["parameters"], *base["gives"], "rain", "snow", "sun"}, (key, form)


def test_conversations_are_written_as_the_template_writes_them(conversations):
    for messages, tools in conversations[:60]:
        text = rendered(messages, tools)
        assert text.isascii()
        found = [json.loads(call) for call in re.findall(r"assistant\n<tool_call>\n(.+)\n</tool_call>", text)]
        assert [call["name"] for call in found] == [call["name"] for call in called_in(messages)]
        assert text.endswith(messages[-1]["content"] + "<|im_end|>\n")
        assert messages[-1]["content"][-1] in ".!?" or "\n" in messages[-1]["content"]


def test_conversations_are_drawn_from_the_seed():
    assert all(calls.conversation(Random(seed)) == calls.conversation(Random(seed)) for seed in range(50))
