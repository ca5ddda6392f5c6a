"""Grammars that are none, cost too much or never end are refused, and what is compiled is kept."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from time import thread_time

import pytest

from tests.support.models import tiny_model
from tests.support.text.grammar import SCHEMA, allowed
from weft import RequestError
from weft.base.grammar import Grammar
from weft.text import grammar as limits
from weft.text import grammar_source as bounds
from weft.text.grammar import Grammars, Guide


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", "{"), "json_schema is not valid JSON"),
        (Grammar("json_schema", "[1]"), "json_schema must be a JSON object"),
        (Grammar("json_schema", '{"type": "strin"}'), "json_schema cannot be used: Invalid type: strin"),
        (Grammar("json_schema", '{"uniqueItems": true}'), "json_schema cannot be used: .*uniqueItems"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "json_schema cannot be used"),
        (Grammar("json_schema", '{"const": NaN}'), "json_schema is not valid JSON: NaN is not a JSON number"),
        (Grammar("json_schema", '{"const": -Infinity}'), "json_schema is not valid JSON: -Infinity"),
        (Grammar("json_schema", '{"const": 1e999}'), "json_schema cannot be used: number out of range"),
        (Grammar("json_schema", '{"const": "\\ud800"}'), "json_schema cannot be used: unexpected end of hex escape"),
        (Grammar("json_schema", f'{{"const": {10**400}}}'), "json_schema cannot be used: number out of range"),
        (Grammar("json_schema", '{"const": ' + "9" * 5000 + "}"), "json_schema is not valid JSON: .*4300 digits"),
        (Grammar("json_schema", '{"const": "\ud800"}'), "json_schema cannot be used"),
        (Grammar("json_schema", '{"$ref": "#"}'), "json_schema has no valid continuation"),
        (Grammar("json_schema", "false"), "json_schema cannot be used: Unsatisfiable"),
        (Grammar("json_schema", deep(bounds.MAX_SCHEMA_DEPTH + 1)), "json_schema is nested more than"),
        (Grammar("json_schema", '{"a":' * 50_000), "json_schema has 250000 characters"),
        (Grammar("json_schema", "[" * 60_000), "json_schema is nested more than"),
        (
            Grammar("json_schema", json.dumps({"properties": {str(i): {} for i in range(bounds.MAX_PROPERTIES + 1)}})),
            "json_schema has an object with 513 members",
        ),
        (Grammar("json_schema", json.dumps({"enum": ["x" * 2049]})), "json_schema has a string of 2049 characters"),
        (Grammar("regex", "("), "regex cannot be used: .*unclosed group"),
        (Grammar("regex", "(?=a)b"), "regex cannot be used: .*look-around"),
        (Grammar("regex", "a" * (bounds.MAX_REGEX_CHARACTERS + 1)), "regex has 4097 characters"),
        (Grammar("regex", ""), "regex allows only an empty answer"),
        (Grammar("choice", "[]"), "choice must be a list of at least one string"),
        (Grammar("choice", '["a", 1]'), "choice must be a list"),
        (Grammar("choice", "nope"), "choice is not valid JSON"),
        (Grammar("choice", json.dumps(["a"] * 1025)), "choice has 1025 strings"),
        (Grammar("choice", json.dumps(["a" * (64 << 10)])), "choice has .* characters"),
        (Grammar("choice", json.dumps(["a" * 2049])), "choice has a string of 2049 characters"),
        (Grammar("lark", 'start: "' + "a" * 2049 + '"'), "grammar has a string of"),
        (Grammar("regex", "\ud800"), "regex cannot be used"),
        (Grammar("choice", '["\\ud800"]'), "choice cannot be used"),
        (Grammar("lark", 'start: "\ud800"'), "grammar cannot be used"),
        (Grammar("lark", "start: nowhere"), "grammar cannot be used"),
        (Grammar("lark", "a" * (bounds.MAX_LARK_CHARACTERS + 1)), "grammar has .* characters"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(grammar, message):
    with pytest.raises(RequestError, match=message):
        Grammars(tiny_model.tokenizer(), 259)(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a{1,1000}){1,1000}"),
        Grammar("regex", "(a?){500}a{500}"),
        Grammar("regex", "(.*a.{20}|.*b.{20})"),
        Grammar("regex", "(?:" * 600 + "a" + ")" * 600),
        Grammar("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(512)}})),
        Grammar("json_schema", json.dumps({"const": "x" * bounds.MAX_TEXT_CHARACTERS})),
        Grammar("lark", "start: a\n" + "\n".join(f"a{'a' * i}: a{'a' * (i + 1)} a{'a' * (i + 1)}" for i in range(30))),
    ],
)
def test_a_costly_grammar_is_served_or_refused_but_never_blocks(grammar):
    began = thread_time()
    try:
        guide = Grammars(tiny_model.tokenizer(), 259)(grammar)
        for _ in range(50):
            guide.take(allowed(guide)[0])
    except RequestError:
        pass
    assert thread_time() - began < 5


class ScriptedClock:
    """A clock that stands still while nothing is looked for. Each look ends `look_seconds` after it began."""

    def __init__(self, look_seconds: float = 0.0) -> None:
        self.look_seconds = look_seconds
        self._readings = itertools.count()
        self._now = 0.0

    def __call__(self) -> float:
        # A look reads the clock when it begins and when it ends.
        self._now += self.look_seconds * (next(self._readings) % 2)
        return self._now


AMBIGUOUS = Grammar("lark", 'start: a\na: a a | "x"')
TOO_AMBIGUOUS = "grammar is too ambiguous"


def tokens_until_refused(guides: list[Guide], most: int = 10_000) -> int:
    """Let answers take turns; return how many tokens they have in all when the first is refused."""
    for count in range(most):
        try:
            guides[count % len(guides)].take(ord("x"))
        except RequestError:
            return count + 1
    return most


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks may take an eighth of the time that they have, so that a test soon reaches its end. Sums are exact."""
    for name, seconds in {"GRAMMAR_SECONDS": 1 / 4, "TENANT_SECONDS": 1.0, "TOKEN_SECONDS": 1 / 256}.items():
        monkeypatch.setattr(limits, name, seconds)


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("answers", [1, 2, 31])
def test_answers_whose_masks_take_too_long_end_with_an_error_however_many_share_the_request(answers):
    """`a: a a` has ever more ways to read what was written. Every look takes twice the time of a token here."""
    grammars = Grammars(tiny_model.tokenizer(), 259, ScriptedClock(2 * limits.TOKEN_SECONDS))
    guides = [grammars(AMBIGUOUS, frozenset(), b"tenant") for _ in range(answers)]
    assert tokens_until_refused(guides) == round(limits.GRAMMAR_SECONDS / limits.TOKEN_SECONDS) + 1


def test_all_grammars_of_a_tenant_share_its_time_whatever_their_cache_salts():
    grammars = Grammars(tiny_model.tokenizer(), 259, ScriptedClock(2 * limits.TOKEN_SECONDS))
    tenant = bytes(range(32))
    guides = [grammars(Grammar("lark", f'start: a\na: a a | "x" | "{n}"'), salt=tenant + bytes([n])) for n in range(40)]
    assert tokens_until_refused(guides) == round(limits.TENANT_SECONDS / limits.TOKEN_SECONDS) + 1


@pytest.mark.usefixtures("little_time")
def test_an_answer_of_another_tenant_has_time_of_its_own_and_so_has_one_after_all_others():
    clock = ScriptedClock(2 * limits.TOKEN_SECONDS)
    grammars = Grammars(tiny_model.tokenizer(), 259, clock)
    first, other = grammars(AMBIGUOUS, salt=b"a" * 32), grammars(AMBIGUOUS, salt=b"b" * 32)
    used = tokens_until_refused([first])
    assert tokens_until_refused([other]) == used
    del first
    assert tokens_until_refused([grammars(AMBIGUOUS, salt=b"a" * 32)]) == used, "what ended long ago still counts"


@pytest.mark.usefixtures("little_time")
def test_an_answer_whose_masks_are_cheap_goes_on_after_others_spent_all_the_time():
    clock = ScriptedClock(2 * limits.TOKEN_SECONDS)
    grammars = Grammars(tiny_model.tokenizer(), 259, clock)
    guides = [grammars(AMBIGUOUS) for _ in range(3)]
    tokens_until_refused(guides[:1])
    clock.look_seconds = limits.TOKEN_SECONDS
    for _ in range(100):
        guides[1].take(ord("x"))
    clock.look_seconds = 2 * limits.TOKEN_SECONDS
    with pytest.raises(RequestError, match=TOO_AMBIGUOUS):
        guides[2].take(ord("x"))


def test_an_answer_whose_masks_take_a_tokens_budget_never_ends_for_that():
    grammars = Grammars(tiny_model.tokenizer(), 259, ScriptedClock(limits.TOKEN_SECONDS))
    assert tokens_until_refused([grammars(Grammar("regex", "x*"))], 2000) == 2000


def test_a_grammar_is_slow_while_its_masks_take_long_on_average():
    clock = ScriptedClock(limits.SLOW_SECONDS / 2)
    grammars = Grammars(tiny_model.tokenizer(), 259, clock)
    guide, sibling, stranger = grammars(AMBIGUOUS), grammars(AMBIGUOUS), grammars(Grammar("regex", "x*"))
    for _ in range(20):
        guide.take(ord("x"))
    assert not guide.slow
    clock.look_seconds = 20 * limits.SLOW_SECONDS
    guide.take(ord("x"))
    assert guide.slow
    assert sibling.slow
    assert not stranger.slow
    clock.look_seconds = 0.0
    for _ in range(20):
        guide.take(ord("x"))
    assert not guide.slow


def test_as_many_optional_properties_as_are_accepted_can_be_answered():
    names = [f"p{number}" for number in range(bounds.MAX_PROPERTIES)]
    schema = {"properties": {name: {"type": "integer"} for name in names}, "additionalProperties": False}
    guide = Grammars(tiny_model.tokenizer(), 259)(Grammar("json_schema", json.dumps({"type": "object", **schema})))
    for byte in json.dumps(dict.fromkeys(names[::50], 1)).encode():
        guide.take(byte)
    assert guide.ended


def test_terminals_that_double_are_refused_before_they_are_built():
    """Each holds the next one twice. The library would notice as well, after minutes."""
    grammars = Grammars(tiny_model.tokenizer(), 259)

    def doubling(levels: int, rule: str = "R{}: R{} R{}", first: str = "start: R0") -> Grammar:
        rules = [rule.format(n, n + 1, n + 1) for n in range(levels)]
        return Grammar("lark", "\n".join([first, *rules, rule.partition("{")[0] + f'{levels}: "a"']))

    grammars.warm()
    began = thread_time()
    for levels in (33, 400, 2000):
        with pytest.raises(RequestError, match="terminals nested"):
            grammars(doubling(levels))
    with pytest.raises(RequestError, match="grammar cannot be used"):
        grammars(doubling(30))
    assert thread_time() - began < 5
    assert grammars(doubling(5)).mask.any()
    # Rules may be as deep as they like: they are not built out.
    assert grammars(doubling(300, "r{}: r{} r{}", "start: r0")).mask.any()


def test_gbnf_is_read_as_well_as_lark():
    grammars = Grammars(tiny_model.tokenizer(), 259)
    guide = grammars(Grammar("lark", 'root ::= "a" digit\ndigit ::= [0-9]'))
    guide.take(ord("a"))
    assert [token for token in range(256) if guide.mask[token // 32] >> (token % 32) & 1] == list(b"0123456789")
    for broken in ('a ::= "x"', "root ::= (", "root ::= missing", "::="):
        with pytest.raises(RequestError, match="grammar cannot be used"):
            grammars(Grammar("lark", broken))


def test_a_compiled_grammar_is_kept_for_the_next_request_and_only_so_many():
    grammars = Grammars(tiny_model.tokenizer(), 259)
    first = grammars.compile(SCHEMA)
    assert grammars.compile(replace(SCHEMA)) is first
    one, other = grammars(SCHEMA), grammars(SCHEMA)
    one.take(ord("{"))
    assert allowed(other) == [ord("{")], "two answers share a place"
    for number in range(limits.MAX_COMPILED):
        grammars.compile(Grammar("regex", f"a{number}"))
    assert len(grammars._compiled) == limits.MAX_COMPILED
    assert grammars.compile(SCHEMA) is not first


def test_compiling_leaves_the_interpreter_lock_to_others():
    """The engine steps in another thread of the same process: it must get its share of the processor."""
    grammars = Grammars(tiny_model.tokenizer(), 259)
    grammars.warm()
    members = {f"q{j}": {"properties": {f"p{i}": {} for i in range(500)}} for j in range(8)}
    grammar = Grammar("json_schema", json.dumps({"properties": members}))
    ready = Grammar("json_schema", source=bounds.source_of(grammar))
    assert share_beside(lambda: grammars.compile(ready)) > 0.1


def test_a_held_interpreter_lock_would_be_seen():
    work = re.compile("(a|a)*b")
    assert share_beside(lambda: work.match("a" * 22)) < 0.1


def share_beside(work: Callable[[], object]) -> float:
    """Return how much processor time this thread gets while another one works, as a part of what the work takes."""
    took: list[float] = []

    def timed() -> None:
        began = thread_time()
        work()
        took.append(thread_time() - began)

    working, began = threading.Thread(target=timed), thread_time()
    working.start()
    while working.is_alive():
        pass
    return (thread_time() - began) / took[0]
