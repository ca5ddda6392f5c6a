"""Checks grammars from clients and translates them into llguidance's format. Compiles nothing; that is `grammar.py`.

All input is bounded before the library reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from llguidance import LLMatcher, gbnf_to_lark

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar, GrammarKind
from weft.text.nesting import nesting

MAX_SCHEMA_CHARACTERS = 64 << 10
MAX_SCHEMA_DEPTH = 64
# Optional properties of one object cost the square of their number.
MAX_PROPERTIES = 512
# A literal costs a microsecond per character and token.
MAX_TEXT_CHARACTERS = 2 << 10
MAX_REGEX_CHARACTERS = 4 << 10
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 64 << 10
MAX_LARK_CHARACTERS = 128 << 10
# Nested terminals: their maximum size doubles with each level, and so does the library's time to notice.
MAX_TERMINAL_DEPTH = 32
# Whitespace between two parts of JSON: enough to indent, and bounded for models that would write nothing else.
MAX_INDENTATION = 32

FIELDS: dict[GrammarKind, str] = {
    "json_schema": "json_schema",
    "json_object": "response_format",
    "regex": "regex",
    "choice": "choice",
    "lark": "grammar",
}
# Schema keys that do not constrain the answer.
EXPLANATIONS = ("description", "title", "$comment")
# Schema keys whose values are data: what looks like an explanation in them is part of an answer.
_DATA = frozenset({"enum", "const", "default", "examples"})
# Schema keys whose values map names to schemas: no name in them is a key of a schema.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_ANY_OBJECT = '{"type": "object"}'
# Whitespace in JSON, for the library: a line break with its indentation, or a few spaces. Small models that may write
# unlimited whitespace between two words of JSON often do.
SPACES: Any = {"whitespace_pattern": rf"(\r?\n[ \t]{{0,{MAX_INDENTATION}}}|[ \t]{{0,2}})"}
# A definition at the start of a line. Linear: possessive throughout, and no part can match what the previous one left.
_TERMINAL = re.compile(r"[^\S\n]*+([A-Z_][A-Z0-9_]*+)(?:\.-?\d++)?+[^\S\n]*+(?:\[[^\]\n]*+\][^\S\n]*+)?+:")
_LARK_START = re.compile(r"[^\S\n]*+(?:%llguidance\b|start[^\S\n]*+:)")
_TERMINAL_NAME = re.compile(r"\b[A-Z_][A-Z0-9_]*+\b")


def source_of(grammar: Grammar) -> str:
    """Return a grammar in llguidance's format, after checking its bounds."""
    try:
        return _translated(grammar)
    except ValueError as error:  # of the library, whose JSON has neither lone surrogates nor numbers beyond a float
        raise InvalidField(FIELDS[grammar.kind], f"cannot be used: {first_words(str(error))}") from None


def _translated(grammar: Grammar) -> str:
    text, field = grammar.text, FIELDS[grammar.kind]
    match grammar.kind:
        case "json_schema":
            schema = checked_schema(text, field)
            # `true` and `false` are schemas too, without room for options.
            return LLMatcher.grammar_from_json_schema(schema, defaults=SPACES if "{" in schema else None)
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=SPACES)
        case "regex":
            _check_size(field, text, MAX_REGEX_CHARACTERS)
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, checked_choices(text))))
        case "lark":
            _check_size(field, text, MAX_LARK_CHARACTERS)
            _check_texts(field, max((len(each) for each in re.findall(r'"[^"]*"', text)), default=0))
            return LLMatcher.grammar_from_lark(checked_lark(as_lark(text, field), field))


def as_lark(text: str, field: str) -> str:
    """Return a grammar as Lark; GBNF (rules of the form `name ::= ...`) is translated.

    >>> as_lark('root ::= "a" | "b"', "grammar").split()[-4:]
    ['start:', '"a"', '|', '"b"']
    """
    if "::=" not in text or any(at_lines(_LARK_START, text)):
        return text
    try:
        return _lark_of_gbnf(text)
    except Exception as error:  # the library raises plain Exception for some errors
        raise InvalidField(field, f"cannot be used: {first_words(str(error))}") from None


def _lark_of_gbnf(text: str) -> str:
    rules = _callees_first(gbnf_to_lark.GrammarParser().parse(text))
    gbnf_to_lark.resolve(rules)
    return "\n".join(["%llguidance {}", *map(str, rules.values())])


def _callees_first(rules: dict[str, gbnf_to_lark.RuleNode]) -> dict[str, gbnf_to_lark.RuleNode]:
    """Return rules in an order in which each follows those that it names, except for cycles.

    The library finds the terminals in as many passes over all rules as their order requires: two with this order, and
    one for every rule with the opposite.
    """
    order: dict[str, gbnf_to_lark.RuleNode] = {}
    seen: set[str] = set()
    for name in rules:
        waiting = [(name, False)]
        while waiting:
            each, done = waiting.pop()
            if done:
                order[each] = rules[each]
            elif each not in seen and each in rules:
                seen.add(each)
                waiting.append((each, True))
                waiting += [(named, False) for named in _named_by(rules[each])]
    return order


def _named_by(rule: gbnf_to_lark.RuleNode) -> list[str]:
    found: list[str] = []
    nodes: list[Any] = [rule]
    while nodes:
        node = nodes.pop()
        if isinstance(node, gbnf_to_lark.RuleRefNode):
            found.append(node.name)
        nodes += node.children()
    return found


def checked_lark(text: str, field: str) -> str:
    """Check that a grammar's terminals are not nested too deeply, and return it."""
    if terminal_depth(text) > MAX_TERMINAL_DEPTH:
        raise InvalidField(field, f"has terminals nested more than {MAX_TERMINAL_DEPTH} levels deep")
    return text


def terminal_depth(text: str) -> int:
    """Return the nesting depth of the terminals of a Lark text; the compiler rejects recursive ones.

    >>> terminal_depth('start: A\\nA: B "x"\\n  | C\\nB: C\\nC: /c/')
    3
    """
    begins = [(found[1], found.start(), found.end()) for found in at_lines(_TERMINAL, text)]
    ends = [start for _, start, _ in begins[1:]] + [len(text)]
    bodies = {name: text[begin:end] for (name, _, begin), end in zip(begins, ends)}
    named = {name: set(_TERMINAL_NAME.findall(body)) & bodies.keys() for name, body in bodies.items()}
    depths = dict.fromkeys(bodies, 1)
    # One more pass than the allowed levels shows whether there are more.
    for _ in range(MAX_TERMINAL_DEPTH + 1):
        deeper = {name: 1 + max((depths[each] for each in held), default=0) for name, held in named.items()}
        if deeper == depths:
            break
        depths = deeper
    return max(depths.values(), default=0)


def at_lines(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern that begin at the start of a line."""
    start = 0
    while True:
        if (found := pattern.match(text, start)) is not None:
            yield found
        start = text.find("\n", start) + 1
        if not start:
            return


def _check_size(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidField(field, f"has {len(text)} characters; the limit is {most}")


def checked_schema(text: str, field: str) -> str:
    """Check that a JSON schema is not too large, deep or wide, and return it."""
    _check_size(field, text, MAX_SCHEMA_CHARACTERS)
    if nesting(text.encode(errors="surrogatepass")) > MAX_SCHEMA_DEPTH:
        raise InvalidField(field, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidField(field, f"is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidField(field, f"must be a JSON object, got {text[:80]}")
    if widest(schema) > MAX_PROPERTIES:
        raise InvalidField(field, f"has an object with {widest(schema)} members; the limit is {MAX_PROPERTIES}")
    _check_texts(field, longest_text(without_explanations(schema)))
    return text


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _check_texts(field: str, longest: int) -> None:
    if longest > MAX_TEXT_CHARACTERS:
        raise InvalidField(field, f"has a string of {longest} characters; the limit is {MAX_TEXT_CHARACTERS}")


def checked_choices(text: str) -> list[str]:
    _check_size("choice", text, MAX_CHOICE_CHARACTERS)
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("choice", f"is not valid JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise InvalidField("choice", "must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise InvalidField("choice", f"has {len(choices)} strings; the limit is {MAX_CHOICES}")
    _check_texts("choice", max(map(len, choices)))
    return choices


def widest(value: Any) -> int:
    """Return the number of members of the largest object anywhere in a JSON value."""
    if isinstance(value, dict):
        return max([len(value), *map(widest, value.values())])
    return max(map(widest, value), default=0) if isinstance(value, list) else 0


def without_explanations(schema: Any) -> Any:
    """Return a schema without its explanations: only the model needs them."""
    if isinstance(schema, list):
        return [without_explanations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: each for key, each in schema.items() if not (key in EXPLANATIONS and isinstance(each, str))}
    return {key: _without_explanations(key, each) for key, each in kept.items()}


def _without_explanations(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _NAMED and isinstance(value, dict):
        return {name: without_explanations(each) for name, each in value.items()}
    return without_explanations(value)


def longest_text(value: Any) -> int:
    """Return the length of the longest key or string anywhere in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max([*map(len, value), *map(longest_text, value.values())], default=0)
    return max(map(longest_text, value), default=0) if isinstance(value, list) else 0


def first_words(error: str) -> str:
    """Return the library's message, without the state that it may append or the mark that it omitted it."""
    return " ".join(error.partition("<state>")[0].replace("<non-verbose/>", "").split())[:300]
