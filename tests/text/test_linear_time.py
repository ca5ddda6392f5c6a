"""What reads client text, model output or model files takes linear time, whatever the text is.

Each entry makes a hostile text of a size. A hundred texts of one size are compared with one text that is a hundred
times longer: linear work takes as long for both, quadratic work a hundred times as long for the long one. Ten times
fail, so the machine's noise decides nothing; only the processor time of the test's own thread is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from tests.support.models import tiny_model
from weft import builtin
from weft.answers.followed import FollowedAnswer
from weft.base.errors import RequestError
from weft.base.grammar import Grammar
from weft.base.sampling import SamplingParams
from weft.engine.events import Output
from weft.engine.request import Request
from weft.server.apis import anthropic_messages
from weft.server.apis.native import GenerateRequest, NativeSampling
from weft.server.apis.openai_responses import ResponsesRequest, messages_of
from weft.server.settings import Limits
from weft.server.texts.bodies import check_depth, decode, wrong_type
from weft.server.texts.fields import check_fields
from weft.text.answer_parts import AnswerPart, joined
from weft.text.grammar_source import as_lark, source_of, terminal_depth
from weft.text.nesting import nesting
from weft.text.parsing import TextParser
from weft.text.patterns import LINEAR
from weft.text.reasoning import REASONING, reasoning_for
from weft.text.scanner import Scanner
from weft.text.stops import StopStrings
from weft.text.template import ChatTemplate
from weft.text.tokenizer import load_tokenizer
from weft.text.tool_grammar import tool_grammar
from weft.text.tools import FORMATS, parser_for
from weft.wire.frames import Frames

TIMES = 100
# Of the long text. Old code needed seconds for one of these.
SIZE = 20_000
LIMITS = Limits()
TINY = tiny_model.tokenizer()
SMALL = load_tokenizer(Path(builtin.place_of(None)))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}

Work = Callable[[Any], object]
Make = Callable[[int], Any]


def repeated(piece: str, before: str = "", after: str = "") -> Make:
    return lambda size: before + piece * (size // len(piece)) + after


def sent(piece: str, before: str = "", after: str = "") -> Make:
    return lambda size: (before + piece * (size // len(piece)) + after).encode()


def in_pieces(feed: Callable[[str], object], text: str) -> None:
    for character in text:
        feed(character)


def parsed(make: Callable[[], TextParser]) -> Work:
    def work(text: str) -> None:
        parser = make()
        parser.feed(text)
        parser.finish()

    return work


def split_by(pattern: str) -> Work:
    return Split(Regex(pattern), "isolated").pre_tokenize_str


def rendered(template: str) -> Work:
    found = ChatTemplate(template)
    return lambda text: found.render([{"role": "user", "content": text}])


def followed(tokens: list[int]) -> None:
    """Streams an answer whose offsets are asked for with every token."""
    request = Request(np.array([1], np.int32), SamplingParams(max_tokens=1 << 20, logprobs=0))
    sequence = FollowedAnswer(request, TINY.detokenizer())
    for token in tokens:
        sequence.take([Output(0, token)])
        sequence.begins(1)


def cut_into_frames(data: bytes) -> None:
    frames = Frames()
    for start in range(0, len(data), 64):
        frames.feed(data[start : start + 64])


def frames(size: int) -> bytes:
    return (4).to_bytes(4, "big") * (size // 8) * 2


def calls(size: int) -> ResponsesRequest:
    items = [{"type": "function_call", "call_id": "c", "name": "f"}] * (size // 20)
    return decode(json.dumps({"input": items}).encode(), ResponsesRequest, LIMITS)


def assistant_blocks(block: dict[str, Any]) -> Make:
    """Make conversations in which one message of the assistant has as many blocks as the size says."""

    def make(size: int) -> anthropic_messages.CountRequest:
        said = [{"role": "assistant", "content": [block] * size}, {"role": "user", "content": "x"}]
        return decode(json.dumps({"messages": said}).encode(), anthropic_messages.CountRequest, LIMITS)

    return make


def wide_tool(size: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(size // 40)]
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {name: {} for name in names}, "required": names}},
    }


def chain(size: int) -> str:
    """Rules of which each names the next one."""
    count = size // 12
    return "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(count)) + f'r{count} ::= "x"\n'


BODY = '{"x":[' + "[]," * 70
DEPTH = lambda body: check_depth(body, 64)  # noqa: E731
BROKEN = lambda body: decode(body, ResponsesRequest, LIMITS)  # noqa: E731
CHECKED = lambda body: check_fields(body, "generate", GenerateRequest, {"sampling_params": NativeSampling}, False)  # noqa: E731
STRICT = lambda body: check_fields(body, "generate", GenerateRequest, {}, True)  # noqa: E731


def named(before: str = "", after: str = "") -> Make:
    """A body with many unknown fields."""
    return lambda size: f"{before}{json.dumps({f'f{n}': n for n in range(size // 16)})}{after}".encode()


TABLE: dict[str, tuple[Work, Make]] = {
    # bodies
    "fields: names": (CHECKED, named()),
    "fields: names in a part": (CHECKED, named('{"sampling_params": [', "]}")),
    "fields: one name": (CHECKED, sent("a", '{"', '": 1}')),
    "fields: one name, refused": (STRICT, sent("a", '{"temp', '": 1}')),
    "fields: a long value": (CHECKED, sent("[],", '{"typical_p": [', "[]]}")),
    "fields: many parts": (CHECKED, sent("{},", '{"sampling_params": [', "{}]}")),
    "depth: string without an end": (DEPTH, sent('\\"', BODY + '"')),
    "depth: one long string": (DEPTH, sent("a", BODY + '"', '"')),
    "depth: backslashes": (DEPTH, sent("\\", BODY + '"')),
    "depth: quotes": (DEPTH, sent('"', BODY)),
    "depth: brackets": (DEPTH, sent("[]", BODY)),
    "body: string without an end": (BROKEN, sent('\\"', BODY + '"')),
    "body: brackets": (BROKEN, sent("[],", '{"input":[')),
    "error: backticks": (wrong_type, repeated("`$", "Expected x - at ")),
    "error: places": (wrong_type, repeated(" - at ", "Expected x")),
    "responses: calls": (lambda body: messages_of(body, Limits()), calls),
    "anthropic: calls": (
        lambda body: anthropic_messages.messages_of(body, LIMITS),
        assistant_blocks({"type": "tool_use", "id": "t", "name": "f", "input": {}}),
    ),
    "anthropic: thinking": (
        lambda body: anthropic_messages.messages_of(body, LIMITS),
        assistant_blocks({"type": "thinking", "thinking": "a" * 500}),
    ),
    "frames": (cut_into_frames, frames),
    # grammars
    "schema: string without an end": (lambda text: nesting(text.encode()), repeated('\\"', '{"a":"')),
    "tools: required": (lambda tool: tool_grammar("lfm2", [tool]), wide_tool),
    "lark: texts": (lambda text: source_of(Grammar("lark", text)), repeated('"', "start: ", "")),
    "gbnf: rules in a chain": (lambda text: as_lark(text, "grammar"), chain),
    "gbnf: comments": (lambda text: as_lark(text, "grammar"), repeated("#\n", 'root ::= "x"\n')),
    "gbnf: groups": (lambda text: as_lark(text, "grammar"), repeated("(a)", "a ::= [a]\nroot ::= ")),
    "choices": (lambda text: source_of(Grammar("choice", json.dumps([text[:2000]] * 9))), repeated("(")),
    "regex": (lambda text: source_of(Grammar("regex", text[:4000])), repeated("(")),
    # answers
    "stops": (lambda text: in_pieces(StopStrings(("a" * 500 + "b", "aab")).feed, text), repeated("a")),
    "parts": (joined, lambda size: [AnswerPart("content", "a")] * size),
    "offsets": (followed, lambda size: [97] * size),
    "half characters": (lambda tokens: TINY.decode(tokens), lambda size: [0xE2] * size),
    # models' files
    "tokenizer: one word": (SMALL.encode, repeated("a")),
    "tokenizer: spaces": (SMALL.encode, repeated(" ")),
    "tokenizer: lines": (SMALL.encode, repeated("\n ")),
    "tokenizer: digits": (SMALL.encode, repeated("1 ")),
    "template: content": (rendered("{{ messages[0].content | trim | replace('a', 'b') }}"), repeated(" a")),
}
for _name, _piece in {
    "newlines": "\n",
    "spaces": " ",
    "tabs": "\t",
    "space, newline": " \n",
    "newline, space": "\n ",
    "newline, tab, space": "\n\t ",
    "carriage returns": "\r\n",
    "names": "A\n",
    "one name": "A",
    "digits": "A.1\n",
    "attributes": "A[",
    "attributes in lines": "A [\n",
    "dashes": "A.-",
    "colons": "A :\n",
}.items():
    TABLE[f"terminals: {_name}"] = terminal_depth, repeated(_piece)
    TABLE[f"lark: {_name}"] = (lambda text: as_lark(text, "grammar")), repeated(_piece, "::=")
for _piece in ("%(", "%", "%0", "%(a)", "(", "{", "{:", "{:1", "{}", ":", "%1.", "1"):
    TABLE[f"format: {_piece}"] = rendered("{{ messages[0].content % 1 }}"), repeated(_piece, "{%(%")
    TABLE[f"braces: {_piece}"] = rendered("{{ messages[0].content.format(1) }}"), repeated(_piece, "{:")
# Runs that alternatives of a pattern begin to match and give up; each of them ends with what fits none.
RUNS = ("a", "A", "Aa", "aA", "1", "1a", "!", "/", " /", "'", "'s", "é", "e\u0301", "ʰ", "\u0301")
RUNS += (" ", "\n", " \n", "\n ", "\t", "\r\n")
for _name, _pattern in LINEAR.items():
    for _piece in RUNS:
        TABLE[f"pattern of {_name}: {_piece!r}"] = split_by(_pattern), repeated(_piece, "", "\x00")
HOSTILE = {"spaces": " ", "newlines": "\n", "brackets": "[", "braces": "{", "quotes": '"', "words": "a ", "less": "<"}
MARKERS = {form: (FORMATS[form].markers or ("```tool_code",))[0] for form in FORMATS}
for _form, _marker in MARKERS.items():
    _work = parsed(lambda form=_form: parser_for(form, [TOOL]))
    for _name, _piece in (
        HOSTILE | {"markers": _marker, "calls": _marker + '{"name": "f", "arguments": {"a": "'}
    ).items():
        TABLE[f"{_form}: {_name}"] = _work, repeated(_piece, _marker)
    TABLE[f"{_form}: arguments"] = _work, repeated("[", _marker + '{"name": "f", "arguments": {"a": ')
    TABLE[f"{_form}: string"] = _work, repeated("a", _marker + "[f(), f(a='")
for _form in REASONING:
    for _name, _piece in HOSTILE.items():
        TABLE[f"{_form} thoughts: {_name}"] = (
            parsed(lambda form=_form: reasoning_for(form)),
            repeated(_piece, "<think>"),
        )


def seconds(work: Work, value: Any, times: int) -> float:
    began = thread_time()
    for _ in range(times):
        with suppress(RequestError):
            work(value)
    return thread_time() - began


def growth(work: Work, make: Make, size: int = SIZE) -> float:
    """Return how much longer one long text takes than as many characters in a hundred short ones."""
    short, long = make(size // TIMES), make(size)
    few, many = seconds(work, short, TIMES), seconds(work, long, 1)
    # Below a millisecond for each thousand characters there is nothing to protect.
    return many / max(few, size * 1e-8)


@pytest.mark.parametrize("name", TABLE)
def test_time_grows_with_the_text_and_not_with_its_square(name):
    # Quadratic work is seen in every attempt, a processor that others slow down in one.
    assert any(growth(*TABLE[name]) < 10 for _ in range(5))


@pytest.mark.parametrize("form", [*FORMATS, *REASONING])
@pytest.mark.parametrize("piece", [*HOSTILE.values(), "f", "\\", "'"])
def test_a_parser_keeps_nothing_that_it_has_read(form, piece):
    """Text is appended with every token: what is kept is copied as often. Only a call that may be none is held."""
    for before in (
        "",
        "<think>",
        "a",
        MARKERS.get(form, ""),
        MARKERS.get(form, "") + '{"name": "f", "arguments": {"a": "',
    ):
        reader = Scanner()
        if form in FORMATS:
            parser = TextParser(reader, FORMATS[form].read(reader, [TOOL]))
        else:
            parser = reasoning_for(form, scanner=reader)
        parser.feed(before)
        kept = 0
        for _ in range(500):
            parser.feed(piece)
            kept = max(kept, len(reader.text) - reader.held)
        assert kept <= 2 * len(before) + 64, before


def test_quadratic_time_would_be_seen():
    import re

    strings = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
    searched = (lambda body: sum(1 for _ in strings.finditer(body)), sent('\\"', BODY + '"'))
    for work, make in (searched, (split_by("a*b|a"), repeated("a"))):
        # The better of two short measurements: what slows the first one down would hide the growth.
        assert max(growth(work, make, 8000) for _ in range(2)) > 10
