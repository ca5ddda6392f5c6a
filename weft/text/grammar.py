"""Grammars for answers: JSON schemas, regular expressions, choices and Lark, compiled into masks over the vocabulary.

Built on llguidance. All input is bounded before it is compiled, and compiling and matching have their own budgets: a
grammar that is too large or too ambiguous is an error of its request only.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, gbnf_to_lark

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar, GrammarKind
from weft.text.guide import Guide, first_words, look_together
from weft.text.nesting import nesting
from weft.text.tokenizer import Tokenizer

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
# Compiled grammars kept for later requests; forced texts whose tokens are kept, and the most characters of one.
MAX_COMPILED, MOST_SPELLED, LONGEST_SPELLED = 32, 4096, 64
# Answers for which waking other threads pays, and the most threads: what is left then is the interpreter's.
FEWEST_TOGETHER, MOST_THREADS = 4, 4

# A lexer state takes one or two kB; a step's budgets are tens of milliseconds at worst, compiling takes seconds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    # Four for each optional property of an object, and as many again for what surrounds it.
    max_items_in_row=8 * MAX_PROPERTIES,
    verbose_errors=False,
)
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


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe.

    `vocab_size` is the model's: ids beyond the tokenizer's are never allowed. With several `threads`, masks of many
    answers are found by them together.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, threads: int = 1) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._executor = LLExecutor(min(threads, MOST_THREADS)) if threads > 1 else None
        self._trie: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._trie_lock = Lock()

    def __call__(self, grammar: Grammar, stop_tokens: frozenset[int] = frozenset()) -> Guide:
        """Return the start of an answer that follows the grammar. Raises `RequestError` if no answer can."""
        guide = Guide(self.compile(grammar).deep_copy(), self._vocab_size, stop_tokens, FIELDS[grammar.kind])
        if guide.ended:
            raise InvalidField(FIELDS[grammar.kind], "allows only an empty answer")
        return guide

    def expect(self, answers: Sequence[tuple[Guide, int]]) -> None:
        """Prepare to take these tokens, each the next one of its answer."""
        if self._executor is not None and len(answers) >= FEWEST_TOGETHER:
            look_together(answers, self._executor)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar ahead of a call. Raises `RequestError` if it is invalid."""
        found = self._compiled.get(grammar)
        if found is None:
            # Outside the lock: a request with a compiled grammar does not wait for another one's compilation.
            source = source_of(grammar) if grammar.source is None else grammar.source
            # The library releases the interpreter lock, so the engine's steps continue.
            found = LLMatcher(self._words(), source, log_level=0, limits=_LIMITS)
            if found.is_error():
                raise InvalidField(FIELDS[grammar.kind], f"cannot be used: {first_words(found.get_error())}")
        with self._lock:
            self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def warm(self) -> None:
        """Prepare everything that the first grammar would have to wait for."""
        self._words()

    def _words(self) -> LLTokenizer:
        """Return the vocabulary as a trie."""
        with self._trie_lock:
            if self._trie is None:
                self._trie = LLTokenizer(TokenizerWrapper(_Words(self._tokenizer, self._vocab_size)))
            return self._trie


# the vocabulary -------------------------------------------------------------------------------------------------------


class _Words:
    """A tokenizer in llguidance's interface. The last token stands for the end and is unknown to the model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known, special = min(tokenizer.size, vocab_size), tokenizer.vocabulary.special
        self.tokens = [tokenizer.bytes_of(token) for token in range(known)]
        self.tokens += [b""] * (vocab_size - known) + [b"<|weft end|>"]
        self.special_token_ids = [*sorted(token for token in special if token < vocab_size), vocab_size]
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, special=False)
        # The library asks for the tokens of what is forced at each of its positions, in every answer.
        self._known = lru_cache(MOST_SPELLED)(self._encode)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return (self._known if len(text) <= LONGEST_SPELLED else self._encode)(text)


# input ----------------------------------------------------------------------------------------------------------------


def source_of(grammar: Grammar) -> str:
    """Return a grammar in llguidance's format, after checking its bounds."""
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
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidField(field, f"is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidField(field, f"must be a JSON object, got {text[:80]}")
    if widest(schema) > MAX_PROPERTIES:
        raise InvalidField(field, f"has an object with {widest(schema)} members; the limit is {MAX_PROPERTIES}")
    _check_texts(field, longest_text(without_explanations(schema)))
    return text


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
