"""Thoughts are told from the answer, whoever opened them and however the text is cut."""

from __future__ import annotations

import pytest

from weft import OptionError
from weft.text.answer_parts import joined
from weft.text.output import OutputParser, output_parser
from weft.text.reasoning import detect_reasoning, opens, reasoning_for

THINK = "<think>\nLet me see.\n\n  Yes.\n</think>\n\nForty-two.\n"


def parse(parser, text: str, size: int = 1) -> list[tuple[str, str]]:
    parts = []
    for start in range(0, len(text), size):
        parts += parser.feed(text[start : start + size])
    return [(part.kind, part.text) for part in joined(parts + parser.finish())]


CASES = [
    ("think", False, THINK, [("reasoning", "Let me see.\n\n  Yes."), ("content", "Forty-two.\n")]),
    ("think", True, "Hm.\n</think>\n\nSo.", [("reasoning", "Hm."), ("content", "So.")]),
    ("think", True, "<think>Hm.</think>So.", [("reasoning", "Hm."), ("content", "So.")]),
    ("think", True, "Never ends </thin", [("reasoning", "Never ends </thin")]),
    ("think", False, "<think>Never ends \n", [("reasoning", "Never ends \n")]),
    ("think", False, " No thoughts, but <think>.", [("content", " No thoughts, but <think>.")]),
    ("think", False, "<thin", [("content", "<thin")]),
    ("think", False, "<think></think>x", [("content", "x")]),
    ("think", False, "<think>a</think>b</think>c", [("reasoning", "a"), ("content", "b</think>c")]),
    ("think", False, "", []),
    ("mistral", False, "[THINK]a[/THINK]b", [("reasoning", "a"), ("content", "b")]),
    (
        "granite",
        False,
        "Here is my thought process:\nHm.\nHere is my response:\nSo.",
        [("reasoning", "Hm."), ("content", "So.")],
    ),
    ("granite", False, "<think>Hm.</think><response>So.</response>", [("reasoning", "Hm."), ("content", "So.")]),
    ("granite", False, "Here is my answer.", [("content", "Here is my answer.")]),
    (
        "harmony",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.",
        [("reasoning", "Hm."), ("content", "So.")],
    ),
]


@pytest.mark.parametrize(("name", "opened", "text", "parts"), CASES)
def test_thoughts_are_told_from_the_answer(name, opened, text, parts):
    for size in (1, 2, 3, 7, 1000):
        assert parse(reasoning_for(name, opened), text, size) == parts


def test_thoughts_come_as_they_are_thought():
    parser = reasoning_for("think", True)
    assert [part.text for part in parser.feed("I think ")] == ["I think"]
    assert [part.text for part in parser.feed("that")] == [" that"]
    assert parser.feed("</th") == []
    assert [part.kind for part in parser.feed("ink>So")] == ["content"]


def test_a_prompt_tells_whether_thoughts_are_open():
    assert opens("think", "<|assistant|>\n<think>\n")
    assert not opens("think", "<|assistant|>\n<think>\n\n</think>\n\n")
    assert not opens("think", "<|assistant|>\n")
    assert not opens("harmony", "<|start|>assistant")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' }}", "think"),
        ("<|start|>assistant<|channel|>analysis", "harmony"),
        ("[THINK]", "mistral"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("plain", None),
    ],
)
def test_the_style_is_told_by_the_template(template, name):
    assert detect_reasoning(template) == name


def test_calls_within_thoughts_are_thoughts_and_those_after_them_calls():
    text = '<think>Maybe <tool_call>{"name": "a"}</tool_call>?</think>\n\nOk.\n<tool_call>{"name": "b"}</tool_call>'
    parts = parse(output_parser("think", "hermes"), text)
    assert parts == [
        ("reasoning", 'Maybe <tool_call>{"name": "a"}</tool_call>?'),
        ("content", "Ok."),
        ("tool_call", "{}"),
    ]


def test_without_parsers_everything_is_content():
    parser = OutputParser()
    assert parse(parser, THINK) == [("content", THINK)]
    assert parser.markers == frozenset()
    assert parse(output_parser("think", None), THINK)[0] == ("reasoning", "Let me see.\n\n  Yes.")
    assert "</think>" in output_parser("think", None).markers
    assert "<|channel|>" in output_parser("harmony", None).markers


def test_an_unknown_style_is_refused_by_name():
    with pytest.raises(OptionError, match="reasoning_parser must be one of think"):
        reasoning_for("loud")
