"""Calls of tools in every notation: found as they come, never half of a marker shown, nothing a model says is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models import tiny_model
from tests.support.models.tiny_model import no_time
from weft import OptionError, RequestError
from weft.base.grammar import Grammar
from weft.text import scanner
from weft.text.answer_parts import AnswerPart, joined
from weft.text.grammar import Grammars
from weft.text.output import output_parser
from weft.text.tool_grammar import after_reasoning, tool_grammar
from weft.text.tools import FORMATS, detect_tools, parser_for

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather. " * 200,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "metric": {"type": "boolean"},
                    "note": {"type": "string", "maxLength": 4, "description": "long " * 600},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "path.find",
            "parameters": {
                "type": "object",
                "properties": {"points": {"$ref": "#/$defs/Points"}},
                "$defs": {"Points": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]

Plain = list[tuple[str, str, str | None]]


def plain(parts: list[AnswerPart]) -> Plain:
    return [(part.kind, part.text, part.name) for part in joined(parts)]


def parse(form: str, text: str, cuts: list[int] | None = None, tools=TOOLS) -> Plain:
    """The parts of a text that arrives in pieces: cut at these places, or character by character."""
    parser, parts = parser_for(form, tools), []
    places = sorted({0, len(text), *(range(len(text)) if cuts is None else [c % (len(text) + 1) for c in cuts])})
    for start, end in pairwise(places):
        parts += parser.feed(text[start:end])
    parts += parser.finish()
    check_calls(parts)
    return plain(parts)


def check_calls(parts: list[AnswerPart]) -> None:
    """Calls are numbered through; the first part of each, and only that, has an id and a name."""
    numbers = [part.call for part in parts if part.kind == "tool_call" and part.name is not None]
    assert numbers == list(range(len(numbers)))
    for part in parts:
        assert (part.id is None) == (part.name is None)
        assert part.kind == "tool_call" or part.name is None


def call(name: str, arguments: str) -> tuple[str, str, str]:
    return "tool_call", arguments, name


def content(text: str) -> tuple[str, str, None]:
    return "content", text, None


PARIS = '{"city": "Paris", "days": 2}'
NAMED = '{"name": "weather", "arguments": ' + PARIS + "}"
HARMONY = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + PARIS

CASES: list[tuple[str, str, Plain]] = [
    # Hermes and Qwen
    ("hermes", f"Sure.\n<tool_call>\n{NAMED}\n</tool_call>", [content("Sure."), call("weather", PARIS)]),
    ("hermes", f"<tool_call>{NAMED}</tool_call>\n<tool_call>{NAMED}</tool_call>", [call("weather", PARIS)] * 2),
    ("hermes", f"<tool_call>{NAMED}</tool_call> Done.", [call("weather", PARIS), content(" Done.")]),
    ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>', [call("weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [call("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [call("now", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [call("a", '{"x": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"x": "</tool_call> \\" } ]", "y": [{}]}}</tool_call>',
        [call("a", '{"x": "</tool_call> \\" } ]", "y": [{}]}')],
    ),
    (
        "hermes",
        f'<tool_call>{{"type": "function", "function": {NAMED}}}</tool_call>',
        [call("weather", PARIS)],
    ),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "cut sho', [call("a", '{"x": "cut sho')]),
    # Phi-4-mini
    ("phi4", f"Sure.<|tool_call|>[{NAMED}]<|/tool_call|>", [content("Sure."), call("weather", PARIS)]),
    ("phi4", f"<|tool_call|>[{NAMED}, {NAMED}]<|/tool_call|>", [call("weather", PARIS)] * 2),
    # OLMo 3
    (
        "olmo3",
        'Sure.\n<function_calls>\nweather(city="Paris", days=2)\nnow()\n</function_calls>',
        [content("Sure."), call("weather", PARIS), call("now", "{}")],
    ),
    # Qwen3-Coder
    (
        "qwen3_coder",
        "Look:\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        [content("Look:"), call("weather", PARIS)],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=note>\n5\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n"
        "<parameter=other>\n[1, 2\n</parameter>\n</function>\n</tool_call>",
        [call("weather", '{"note": "5", "metric": true, "other": "[1, 2"}')],
    ),
    (
        "qwen3_coder",
        "<function=weather>\n<parameter=note>\na\n\n <b>\n</parameter>\n</function>",
        [call("weather", '{"note": "a\\n\\n <b>"}')],
    ),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [call("now", "{}")]),
    (
        "qwen3_coder",
        "<tool_call><function=now></function></tool_call><tool_call><function=now></function></tool_call>",
        [call("now", "{}")] * 2,
    ),
    ("qwen3_coder", "<function=a><parameter=x>1</function></tool_call>", [call("a", '{"x": 1}')]),
    # Markers inside the quotes of JSON are text.
    (
        "qwen3_coder",
        '<function=path.find>\n<parameter=points>\n["</parameter>", "<function=f>"]\n</parameter>\n</function>',
        [call("path.find", '{"points": ["</parameter>", "<function=f>"]}')],
    ),
    ("qwen3_coder", '<function=path.find>\n<parameter=points>\n["a</parameter> cut', [call("path.find", "")]),
    (
        "harmony",
        'to=functions.f<|message|>{"a": "<|end|><|start|> to=functions.g"}<|call|>',
        [call("f", '{"a": "<|end|><|start|> to=functions.g"}')],
    ),
    ("harmony", 'to=functions.f<|message|>{"a": <|end|>Hm.', [call("f", '{"a": '), content("Hm.")]),
    # LFM2
    (
        "lfm2",
        'On it.<|tool_call_start|>[weather(city="Paris", days=2), path.find(points=[1, -2])]<|tool_call_end|>Wait.',
        [content("On it."), call("weather", PARIS), call("path.find", '{"points": [1, -2]}'), content("Wait.")],
    ),
    ("lfm2", '<|tool_call_start|>[weather("Paris", 2)]<|tool_call_end|>', [call("weather", PARIS)]),
    (
        "lfm2",
        "<|tool_call_start|>[f(a='it\\'s', b={'k': (None, True, false)}, c=\"\"\"x\"y\"\"\", d=1.5e3, e='\\u00e9\\x41')"
        "]",
        [call("f", '{"a": "it\'s", "b": {"k": [null, true, false]}, "c": "x\\"y", "d": 1500.0, "e": "éA"}')],
    ),
    ("lfm2", f"<|tool_call_start|>[{NAMED}]<|tool_call_end|>", [call("weather", PARIS)]),
    ("lfm2", "<|tool_call_start|>[f(a=-1e999)]", [call("f", '{"a": -1.7976931348623157e+308}')]),
    # Llama 3
    ("llama3_json", f'{{"name": "weather", "parameters": {PARIS}}}', [call("weather", PARIS)]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
        [call("weather", PARIS), call("now", "{}")],
    ),
    # Mistral
    ("mistral", f"[TOOL_CALLS][{NAMED}, {NAMED}]", [call("weather", PARIS)] * 2),
    ("mistral", f"Hm.[TOOL_CALLS]weather[ARGS]{PARIS}", [content("Hm."), call("weather", PARIS)]),
    (
        "mistral",
        f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]now{{}}",
        [call("weather", PARIS), call("now", "{}")],
    ),
    # Granite, Nemotron
    ("granite", f"<|tool_call|>[{NAMED}]", [call("weather", PARIS)]),
    ("granite", f"<tool_call>\n{NAMED}\n</tool_call>", [call("weather", PARIS)]),
    ("nemotron", f"<TOOLCALL>[{NAMED}, {NAMED}]</TOOLCALL>", [call("weather", PARIS)] * 2),
    # Gemma
    ("gemma", '```tool_code\nprint(weather(city="Paris", days=2))\n```', [call("weather", PARIS)]),
    ("gemma", '```tool_code\nweather(city="Paris", days=2)\nnow()\n```', [call("weather", PARIS), call("now", "{}")]),
    ("gemma", f'```json\n{{"name": "weather", "parameters": {PARIS}}}\n```', [call("weather", PARIS)]),
    # gpt-oss
    (
        "harmony",
        f"<|channel|>analysis<|message|>I wonder.<|end|><|start|>assistant{HARMONY}<|call|>",
        [("reasoning", "I wonder.", None), call("weather", PARIS)],
    ),
    ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", [call("weather", PARIS)]),
    (
        "harmony",
        "<|channel|>commentary<|message|>First this.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
        [content("First this.Hello.")],
    ),
]

# Texts that look like calls and are none: they stay as they are.
NO_CALLS = [
    ("hermes", "a <tool_call>oops</tool_call> b"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": [1], "name": "f"}</tool_call>'),
    ("hermes", "if a <tool and b <tool_cal"),
    ("hermes", '<tool_call>{"name": "f"'),
    ("qwen3_coder", "<tool_call>nothing</tool_call>"),
    ("qwen3_coder", "<function=" + "x" * 300 + ">"),
    ("lfm2", '<|tool_call_start|>[__import__("os").system("true")]<|tool_call_end|>'),
    ("lfm2", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=1 + 1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=lambda: 1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(*x, **y)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=[i for i in x])]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=nan)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=" + "[" * 60 + "]" * 60 + ")]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=" + "-" * 5000 + "1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(1, 2, 3)]<|tool_call_end|>"),
    ("llama3_json", '{"city": "Paris", "name": "weather"}'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", ' {"a": 1} and more'),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("gemma", '```json\n{"a": 1}\n```'),
    ("gemma", "```tool_code\nimport os\n```"),
    ("harmony", "to be, or not"),
]


@pytest.mark.parametrize(("form", "text", "parts"), CASES)
def test_calls_are_found_however_the_text_is_cut(form, text, parts):
    assert parse(form, text) == parts
    assert parse(form, text, []) == parts
    for place in range(1, len(text)):
        assert parse(form, text, [place]) == parts


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_stays_content(form, text):
    for cuts in (None, [], [7], [3, 20]):
        assert parse(form, text, cuts) == [content(text)]


def test_nothing_shown_is_ever_half_of_a_marker():
    """After every character what was shown so far is a beginning of the final content, of the final calls."""
    for form, text, parts in CASES:
        parser, told = parser_for(form, TOOLS), []
        final = {kind: "".join(t for k, t, _ in parts if k == kind) for kind in ("content", "reasoning", "tool_call")}
        for character in text:
            told += parser.feed(character)
            for kind, whole in final.items():
                shown = "".join(part.text for part in told if part.kind == kind)
                assert whole.startswith(shown), (form, shown)


def test_arguments_and_content_come_as_they_are_written():
    parser = parser_for("hermes")
    assert plain(parser.feed("Hello the")) == [content("Hello the")]
    assert plain(parser.feed("re <tool")) == [content("re")]
    assert parser.feed('_call>{"name": "f", "argum') == []
    assert plain(parser.feed('ents": {"a": "xy')) == [call("f", '{"a": "xy')]
    assert plain(parser.feed('z"')) == [("tool_call", 'z"', None)]
    assert plain(parser.feed("}}</tool_call>")) == [("tool_call", "}", None)]
    assert parser.finish() == []
    parser = parser_for("qwen3_coder", TOOLS)
    assert plain(parser.feed("<tool_call><function=weather>")) == [call("weather", "")]
    assert plain(parser.feed("<parameter=city>Oslo</parameter>")) == [("tool_call", '{"city": "Oslo"', None)]
    assert plain(parser.feed("</function>")) == [("tool_call", "}", None)]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=weather>", "<parameter=city>", "</parameter>", "</function>", "\n", " ",
    "<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "weather(", 'city="Pa', '"', ")", ",", "{", "}",
    "<|python_tag|>",
    '"name"', ":", '"weather"', '"arguments"', "[TOOL_CALLS]", "[ARGS]", "<TOOLCALL>", "</TOOLCALL>",
    "```tool_code", "```",
    "<|tool_call|>", "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>", "assistant", " to=functions.f",
    "\\",
    NAMED, PARIS, "5", "é", "words of an answer", "<think>", "</think>", ";", "'", "=", "null", "print(",
]  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    form=st.sampled_from(sorted(FORMATS)),
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 500), max_size=12),
)
def test_whatever_comes_the_parts_do_not_depend_on_the_cuts(form, pieces, cuts):
    text = "".join(pieces)
    whole = parse(form, text, [])
    assert parse(form, text, cuts) == whole
    assert parse(form, text) == whole
    for _, shown, name in whole:
        f"{shown}{name}".encode()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14), cuts=st.lists(st.integers(0, 500), max_size=12))
def test_thoughts_and_calls_together_do_not_depend_on_the_cuts(pieces, cuts):
    text = "".join(pieces)
    for prompt in ("", "<think>\n"):
        found = []
        for places in ([], cuts):
            parser, parts = output_parser("think", "hermes", TOOLS, prompt), []
            ends = sorted({0, len(text), *(c % (len(text) + 1) for c in places)})
            for start, end in pairwise(ends):
                parts += parser.feed(text[start:end])
            found.append(plain(parts + parser.finish()))
        assert found[0] == found[1]


def test_what_is_held_back_is_bounded(monkeypatch):
    monkeypatch.setattr(scanner, "MAX_HELD", 1000)
    parser = parser_for("hermes")
    parser.feed('<tool_call>{"other": "')
    assert sum(len(part.text) for _ in range(60) for part in parser.feed("x" * 20)) > 900
    monkeypatch.setattr(scanner, "MAX_CALLS", 3)
    found = parse("hermes", f"<tool_call>{NAMED}</tool_call>" * 5)
    assert [kind for kind, _, _ in found] == ["tool_call"] * 3 + ["content"]


def test_a_long_call_costs_the_same_for_every_token():
    parser = parser_for("hermes")
    parser.feed('<tool_call>{"name": "f", "arguments": {"code": "')
    for _ in range(20_000):
        assert len(parser.feed("some code ")) == 1
    assert len(parser._scanner.text) < 100


def test_ids_are_those_that_the_family_takes():
    (first,) = joined(parser_for("mistral").feed(f"[TOOL_CALLS][{NAMED}]"))
    assert len(first.id) == 9
    assert first.id.isalnum()
    (other,) = joined(parser_for("hermes").feed(f"<tool_call>{NAMED}</tool_call>"))
    assert other.id.startswith("call_")
    assert other.id != joined(parser_for("hermes").feed(f"<tool_call>{NAMED}</tool_call>"))[0].id


@pytest.mark.parametrize(
    ("family", "template", "form"),
    [
        ("qwen3_next", "{% if tools %}<tool_call>\n{...}</tool_call>{% endif %}", "hermes"),
        ("qwen3_5", "{% if tools %}<tool_call>\n<function=example>{% endif %}", "qwen3_coder"),
        ("Lfm2ForCausalLM", "{% if tools %}<|tool_list_start|>{% endif %}", "lfm2"),
        ("lfm2_moe", "{% if tools %}List of tools{% endif %}", "lfm2"),
        ("llama", "{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("mistral", "[AVAILABLE_TOOLS]", "mistral"),
        ("granitemoehybrid", "{{ tools }}<|tool_call|>", "granite"),
        ("GraniteMoeHybridForCausalLM", "{{ tools }} <tool_call>", "hermes"),
        ("nemotron_h", "{{ tools }}<TOOLCALL>", "nemotron"),
        ("nemotron_h", "{{ tools }} <function=f>", "qwen3_coder"),
        ("phi3", "{{ tools }}<|/tool|>", "phi4"),
        ("olmo3", "{{ tools }}<function_calls>", "olmo3"),
        ("lfm3", "{{ tools }}", "lfm2"),
        ("qwen2", "{{ tools }}<tool_call>", "hermes"),
        ("smollm3", "{{ tools }}", "hermes"),
        ("gpt_oss", "<|start|><|channel|>", "harmony"),
        ("gemma3_text", "{{ tools }}", "gemma"),
        ("gemma3_text", None, "gemma"),
        ("llama", "no such thing", None),
        ("unheard_of", None, None),
    ],
)
def test_the_format_is_told_by_the_template_and_then_by_the_family(family, template, form):
    assert detect_tools(family, template) == form


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(OptionError, match="tool_parser must be one of hermes"):
        parser_for("none")


# grammars -------------------------------------------------------------------------------------------------------------


def generated(grammar: Grammar, seed: int, most: int = 1500) -> str | None:
    """A random text of a grammar; none if it did not come to an end."""
    random, answer = Random(seed), []
    guide = Grammars(tiny_model.tokenizer(), 259, no_time)(grammar, frozenset([257]))
    while not guide.ended:
        free = np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little")).tolist()
        # The end, when it may come, and rarely anything else than letters: texts would be mostly controls.
        token = 257 if 257 in free else random.choice([t for t in free if 32 <= t < 127] or free)
        if token == 257:
            break
        answer.append(token)
        guide.take(token)
        if len(answer) > most:
            return None
    return tiny_model.tokenizer().decode(answer)


def arguments_fit(name: str, arguments: dict) -> bool:
    if name == "weather":
        return arguments["city"] in ("Paris", "Oslo") and set(arguments) <= {"city", "days", "metric", "note"}
    points = arguments.get("points", [])
    return name == "now" or (name == "path.find" and all(isinstance(point, int) for point in points))


@pytest.mark.parametrize("form", sorted(set(FORMATS) - {"harmony"}))
@pytest.mark.parametrize("only", [None, "weather", "path.find"])
def test_a_forced_call_is_always_a_call_of_a_tool_with_fitting_arguments(form, only):
    grammar = tool_grammar(form, TOOLS, only=only)
    called = set()
    for seed in range(10):
        text = generated(grammar, seed)
        if text is None:
            continue
        for kind, arguments, name in parse(form, text, []):
            assert kind == "tool_call"
            assert arguments_fit(name, json.loads(arguments)), text
            called.add(name)
    assert called == {only} if only else len(called) > 1


def test_forced_calls_may_follow_thoughts():
    tokenizer = Grammars(tiny_model.tokenizer(), 259, no_time)

    def takes(grammar: Grammar, text: str) -> bool:
        guide = tokenizer(grammar, frozenset())
        try:
            for token in text.encode():
                guide.take(token)
        except RequestError:
            return False
        return True

    forced = f"<tool_call>\n{NAMED}\n</tool_call>"
    opened = tool_grammar("hermes", TOOLS, reasoning="think", prompt="<think>\n")
    assert takes(opened, f"Hm <x.</think>\n\n{forced}")
    assert not takes(tool_grammar("hermes", TOOLS), "Hm")
    choice = tool_grammar("hermes", TOOLS, reasoning="think", prompt="assistant\n")
    assert takes(choice, f"<think>Hm.</think>\n\n{forced}")
    assert takes(choice, forced)
    assert not takes(choice, "Hm")
    closed = tool_grammar("hermes", TOOLS, reasoning="think", prompt="<think>\n\n</think>\n\n")
    assert not takes(closed, "<think>")
    assert takes(tool_grammar("harmony", TOOLS), f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY}")
    for grammar, answer in [
        (Grammar("regex", "a/[0-9]"), "a/1"),
        (Grammar("choice", '["yes", "no"]'), "no"),
        (Grammar("json_object"), '{"a": 1}'),
        (Grammar("json_schema", '{"type": "integer"}'), "17"),
    ]:
        assert takes(after_reasoning(grammar, "think", "<think>"), f"Hm.</think>\n\n{answer}")
        assert not takes(after_reasoning(grammar, "think", "<think>"), "Hm.</think>\n\nx")
        assert after_reasoning(grammar, "think", "<think></think>") == grammar


def test_special_tokens_stand_in_a_grammar_as_themselves():
    grammar = tool_grammar("lfm2", TOOLS, token_of={"<|tool_call_start|>": 10, "<|tool_call_end|>": 11}.get)
    assert "<[10]>" in grammar.text
    assert "tool_call_start" not in grammar.text
    assert tiny_model.tokenizer().special_token("<|end|>") == 257
    assert tiny_model.tokenizer().special_token("a") is None
    assert "[ARGS]" not in tool_grammar("mistral", TOOLS).text
    assert "<[7]>" in tool_grammar("mistral", TOOLS, token_of={"[ARGS]": 7}.get).text


@pytest.mark.parametrize(
    ("tools", "only", "message"),
    [
        ([], None, "has no tools"),
        (TOOLS, "nothing", "tool_choice names 'nothing'"),
        (TOOLS * 100, None, "tools has 300 entries"),
        ([{"function": {"name": "f", "parameters": {"const": "x" * 3000}}}], None, r"tools\[0\]\.function\.parameters"),
    ],
)
def test_tools_that_cannot_be_forced_are_refused_by_name(tools, only, message):
    with pytest.raises(RequestError, match=message):
        tool_grammar("hermes", tools, only=only)
