"""Strings of tool calls in tags (Qwen3-Coder), which have no quotes: lengths and patterns of their schemas."""

from __future__ import annotations

import re
from functools import cache

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import tiny_model
from tests.support.models.tiny_model import no_time
from weft.base.errors import RequestError
from weft.base.grammar import Grammar
from weft.text.call_values import MAX_COUNTED, NO_ENDS
from weft.text.formats.tagged import VALUE_ENDS
from weft.text.grammar import Grammars
from weft.text.schema_patterns import translate
from weft.text.tool_grammar import tool_grammar

END = 257
CALL = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
PIECES = [
    "\n",
    "</",
    "</parameter",
    "</function>",
    "</function>\n",
    "</tool_call>",
    "<",
    "é",
    "a",
    "\U0001f600",
    "</p>",
]


@cache
def grammars() -> Grammars:
    return Grammars(tiny_model.tokenizer(), 259, no_time)


def takes(grammar: Grammar, text: str) -> bool:
    guide = grammars()(grammar, frozenset([END]))
    for token in text.encode():
        if guide.ended or not guide.mask[token >> 5] >> (token & 31) & 1:
            return False
        guide.take(token)
    return guide.ended or bool(guide.mask[END >> 5] >> (END & 31) & 1)


def tools(**properties: dict) -> list[dict]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def strict(**properties: dict) -> Grammar:
    return tool_grammar("qwen3_coder", tools(**properties), strict={"f"})


@hypothesis.settings(max_examples=200)
@given(text=st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_a_value_is_any_text_without_its_ends(text):
    """Checked on the expression itself: the brackets and escapes that it uses mean the same to Python."""
    assert bool(re.fullmatch(NO_ENDS, text)) == (not any(end in text for end in VALUE_ENDS)), text


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"minLength": 513}, "minLength .* from 0 to 512"),
        ({"minLength": True}, "minLength .* from 0 to 512"),
        ({"maxLength": -3}, "maxLength .* from 0 to 1024"),
        ({"maxLength": MAX_COUNTED + 1}, "maxLength .* from 0 to 1024"),
        ({"maxLength": 1 << 40}, "maxLength .* from 0 to 1024"),
        ({"maxLength": "5"}, "maxLength .* from 0 to 1024"),
        ({"minLength": 3, "maxLength": 2}, "maxLength .* from 3 to 1024"),
        ({"pattern": 5}, "pattern .* must be a string"),
        ({"pattern": "(?=a)b"}, r"pattern '\(\?=a\)b' .* not supported: of groups"),
        ({"pattern": r"(a)\1"}, r"'\\1' is not supported"),
        ({"pattern": "(a{600}){2}"}, "at most 1024 counted"),
        ({"pattern": "(" * 40 + "a" + ")" * 40}, "nested more than 16"),
    ],
)
def test_what_cannot_be_enforced_is_ignored_unless_strict(lengths, message):
    schema = {"type": "string", **lengths}
    for value in ("", "a", "a<\nb" * 500):
        assert takes(tool_grammar("qwen3_coder", tools(x=schema)), CALL.format(value))
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters cannot be enforced: .*" + message):
        strict(x=schema)


def test_the_largest_lengths_are_enforced():
    """The text between is what needs most of the lexer's states: beginnings of ends, and line breaks."""
    grammar = strict(x={"type": "string", "minLength": 512, "maxLength": MAX_COUNTED})
    hard = "a</function>\n</tool\n</parameter\n\n<é" * 40
    for length, fits in ((511, False), (512, True), (MAX_COUNTED, True), (MAX_COUNTED + 1, False)):
        assert takes(grammar, CALL.format(hard[: length - 1] + "x")) is fits, length


def test_the_strings_of_all_tools_share_the_counted_characters():
    half = {"type": "string", "maxLength": MAX_COUNTED // 2}
    strict(x=half, y=half)
    with pytest.raises(RequestError, match="at most 1024 counted characters in all"):
        strict(x=half, y=half, z={"type": "string", "minLength": 1})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[a-z]+$"}, ["abc"], ["", "aBc", "abc1", "a\nb"]),
        ({"pattern": "b"}, ["b", "abc", "\nb<\n"], ["", "ac"]),
        ({"pattern": "^a|b$"}, ["a", "ax", "xb"], ["xa", "bx"]),
        ({"pattern": r"^\d{4}-\d{2}$"}, ["2024-05"], ["2024-5", "20240-05", "\u0661\u0662\u0663\u0664-\u0665\u0666"]),
        ({"pattern": r"^(?:[\w.]+@)?\w+\.(com|org)$"}, ["a.b@c.com", "c.org"], ["@c.com", "c.net"]),
        ({"pattern": r"^[^\s/\]]*/?$"}, ["ab", "a/", "["], ["a b", "]", "a/b"]),
        ({"pattern": r"^[\[a-c\-]*$"}, ["[a-b", ""], ["d"]),
        ({"pattern": r"^a.c$"}, ["abc", "a<c"], ["a\nc", "ac"]),
        ({"pattern": r"^(<\/?p>)*$"}, ["<p></p>"], ["<p", "</parameter>"]),
        ({"pattern": r"^A\x42\u0043\.\*$"}, ["ABC.*"], ["ABCxx"]),
        ({"pattern": "^a+?b{1,2}?$"}, ["aab", "abb"], ["abbb", "b"]),
        ({"pattern": "^a*$", "minLength": 2, "maxLength": 3}, ["aa", "aaa"], ["a", "aaaa", "bb"]),
        ({"type": ["string", "null"], "pattern": "^a$", "minLength": 1}, ["a", "null"], ["b", "nul"]),
        ({"type": ["string", "integer"], "pattern": "l$"}, ["al"], ["null"]),
        ({"enum": ["a", "bcd"], "maxLength": 2}, ["a"], ["bcd"]),
    ],
)
def test_patterns_are_enforced(schema, good, bad):
    grammar = strict(x={"type": "string", **schema})
    assert [value for value in good + bad if takes(grammar, CALL.format(value))] == good


@pytest.mark.parametrize(
    "pattern", ["(a", "a)", "[", "[]", "a**", "*", "(^a)", "a$b", "a^", r"\b", r"\k", "\\", "[z-a]"]
)
def test_patterns_without_an_exact_translation_are_refused(pattern):
    with pytest.raises(RequestError, match="is not supported: "):
        strict(x={"type": "string", "pattern": pattern})


def test_a_pattern_beside_an_enumeration_is_refused():
    with pytest.raises(RequestError, match="both pattern and enum"):
        strict(x={"type": "string", "enum": ["a"], "pattern": "b"})


ATOMS = [
    "a",
    "b",
    "-",
    ".",
    "[ab]",
    "[^a-c]",
    r"\d",
    r"\.",
    "(a|b)",
    "(?:ab|c)",
    "^",
    "$",
    "|",
    "*",
    "+",
    "?",
    "{2}",
    "{1,3}",
]


@hypothesis.settings(max_examples=150)
@given(pattern=st.lists(st.sampled_from(ATOMS), max_size=6).map("".join), text=st.text("abc.1-\n", max_size=6))
def test_a_translation_finds_what_the_pattern_finds(pattern, text):
    """Python's own expressions are the oracle; its word for JavaScript's `$` is `\\Z`."""
    try:
        found = translate(pattern)
    except ValueError:
        return
    whole = re.sub(r"\\x\{([0-9A-F]+)\}", lambda code: re.escape(chr(int(code[1], 16))), found.regex)
    expected = re.search(pattern.replace("$", r"\Z"), text)
    assert bool(re.fullmatch(whole, text)) == bool(expected), (pattern, whole)
