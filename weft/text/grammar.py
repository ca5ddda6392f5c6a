"""Grammars for answers: JSON schemas, regular expressions, choices and Lark, compiled into masks over the vocabulary.

Built on llguidance. All input is bounded before it is compiled, and compiling and matching have their own budgets: a
grammar that is too large or too ambiguous is an error of its request only.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from threading import Lock
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, gbnf_to_lark
from numpy.typing import NDArray

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar, GrammarKind
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
# Processor time that looking ahead of an answer may take in a step. Masks of an ambiguous grammar take longer and
# longer, and all other answers wait for them.
LOOK_AHEAD_SECONDS = 0.01
# Processor time for the masks of an answer: at first, and more with each token. Those of `a: a a | "x"` take time that
# grows with the square of the answer's length, and all other answers wait for them. Schemas take 0.1 ms on average.
ANSWER_SECONDS = 1.0
TOKEN_SECONDS = 0.005

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

    `vocab_size` is the model's: ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
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

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar ahead of a call. Raises `RequestError` if it is invalid."""
        found = self._compiled.get(grammar)
        if found is None:
            # Outside the lock: a request with a compiled grammar does not wait for another one's compilation.
            source = source_of(grammar) if grammar.source is None else grammar.source
            # The library releases the interpreter lock, so the engine's steps continue.
            found = LLMatcher(self._words(), source, log_level=0, limits=_LIMITS)
            if found.is_error():
                raise InvalidField(FIELDS[grammar.kind], f"cannot be used: {_first_words(found.get_error())}")
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


class _Look(NamedTuple):
    """What may come after a token of a look ahead, and the processor time that it took to find."""

    mask: NDArray[np.int32]
    ended: bool
    seconds: float


class Guide:
    """One answer that follows a grammar: `mask` has one bit per token, set if it may come next.

    Stop tokens are allowed only where the answer may end, whatever their text. `ended`: only stop tokens may follow.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_tokens: frozenset[int], field: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field
        self._stops = _mask_of([token for token in stop_tokens if token < vocab_size], vocab_size)
        self._not_stops = ~self._stops
        self.ended = False
        # The last look ahead: tokens, and what may come after each of them.
        self._ahead: tuple[list[int], list[_Look]] = ([], [])
        self._look_seconds = 0.0
        self._seconds_left = ANSWER_SECONDS
        self.mask = self._look()

    def take(self, token: int) -> None:
        """Advance by a token. Raises `RequestError` at a dead end."""
        began = thread_time()
        tokens, looks = self._ahead
        self._ahead = ([], [])
        if _has(self._stops, token):
            self.ended = True
            return
        if not self._matcher.consume_token(token):
            raise InvalidField(self._field, f"has failed on the answer: {_first_words(self._matcher.get_error())}")
        if looks and tokens[0] == token:
            # A draft that was accepted: what may come next was found when it was proposed.
            self._ahead = tokens[1:], looks[1:]
            self.mask, self.ended, self._look_seconds = looks[0]
        else:
            self.mask = self._look()
            self._look_seconds = thread_time() - began
        self._seconds_left += TOKEN_SECONDS - self._look_seconds
        if self._seconds_left < 0 and not self.ended:
            raise InvalidField(self._field, "is too ambiguous: finding the next tokens of this answer takes too long")

    def look_ahead(self) -> Ahead:
        """Return a position that looks ahead of the answer, from here. What it finds is kept for `take`."""
        return Ahead(self)

    def masks_along(self, tokens: Sequence[int]) -> list[NDArray[np.int32]]:
        """Return the masks after each of further tokens, as far as the answer may go on and time allows.

        The position stays. Asked again for the same tokens or the first of them, it returns the same masks.
        """
        found, looks = self._ahead
        if not tokens or tuple(found[: len(tokens)]) != tuple(tokens):
            ahead = self.look_ahead()
            for token in tokens:
                if not ahead.allows(token) or not ahead.take(token):
                    break
            looks = self._ahead[1]
        return [look.mask for look in looks[: len(tokens)]]

    def _look(self) -> NDArray[np.int32]:
        # The end is a token of its own, after the model's vocabulary.
        found = np.empty(self._vocab_size // 32 + 1, np.int32)
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        if self._matcher.is_error():
            raise InvalidField(self._field, f"has no valid continuation: {_first_words(self._matcher.get_error())}")
        mask = found[: len(self._stops)]
        if self._vocab_size % 32:
            mask[-1] &= np.int32((1 << self._vocab_size % 32) - 1)
        mask &= self._not_stops
        may_end = self._matcher.is_accepting()
        self.ended = not mask.any()
        if self.ended and not may_end:
            raise InvalidField(self._field, "has no continuation that this model's vocabulary can spell")
        if may_end:
            mask |= self._stops
        return mask


class Ahead:
    """A position that looks ahead of an answer. All it takes is at most `LOOK_AHEAD_SECONDS` of processor time."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        # What the last look ahead found. The copy of the guide is made where more is needed.
        self._known = guide._ahead
        self._copy: Guide | None = None
        self._end = thread_time() + LOOK_AHEAD_SECONDS
        self._tokens: list[int] = []
        self._looks: list[_Look] = []
        self._at = _Look(guide.mask, guide.ended, guide._look_seconds)
        guide._ahead = self._tokens, self._looks

    def forced(self) -> int | None:
        """Return the only token that may come next; None if there is a choice, or if the answer ends here."""
        mask = self._at.mask
        if self._at.ended or np.count_nonzero(mask) != 1:
            return None
        place = int(np.flatnonzero(mask)[0])
        word = int(mask[place]) & 0xFFFFFFFF
        return None if word & (word - 1) else 32 * place + word.bit_length() - 1

    def allows(self, token: int) -> bool:
        """Return whether a token may come next and does not end the answer."""
        return not self._at.ended and not _has(self._guide._stops, token) and _has(self._at.mask, token)

    def take(self, token: int) -> bool:
        """Advance by an allowed token, unless finding what may follow it takes too long. Return whether it did."""
        look = self._look(token)
        if look is None:
            return False
        self._tokens.append(token)
        self._looks.append(look)
        self._at = look
        return True

    def _look(self, token: int) -> _Look | None:
        place = len(self._tokens)
        tokens, looks = self._known
        if self._copy is None and place < len(tokens) and tokens[place] == token:
            return looks[place]
        # The next mask takes about as long as the last one did.
        if thread_time() + self._at.seconds > self._end:
            return None
        if self._copy is None:
            # A copy: budgets that looking ahead spends, and its errors, are not the answer's.
            self._copy = copy(self._guide)
            self._copy._matcher = self._guide._matcher.deep_copy()
            self._copy._matcher.consume_tokens(self._tokens)
            self._copy._ahead = ([], [])
        try:
            self._copy.take(token)
        except InvalidField:
            return None
        return _Look(self._copy.mask, self._copy.ended, self._copy._look_seconds)


def _mask_of(tokens: list[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _has(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def _first_words(error: str) -> str:
    """Return the library's message, without the state that it may append or the mark that it omitted it."""
    return " ".join(error.partition("<state>")[0].replace("<non-verbose/>", "").split())[:300]


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
        raise InvalidField(field, f"cannot be used: {_first_words(str(error))}") from None


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
