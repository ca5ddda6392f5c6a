"""Arguments of tool calls as grammar rules, in formats that do not write them as one JSON object.

The parsers of these formats (`formats/tagged.py`, `formats/pythonic.py`) decide what a value means, so the rules here
allow only values that the parsers read back as the schema demands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.base.errors import InvalidField
from weft.text.formats.tagged import VALUE_ENDS
from weft.text.grammar_source import EXPLANATIONS
from weft.text.lark_rules import Rules, regex_of
from weft.text.schema_patterns import Translated, translate

Schema = Mapping[str, Any]
JsonRule = Callable[[Schema], str]
Refuse = Callable[[str], InvalidField]

# Keys of a schema that constrain nothing.
ANNOTATIONS = frozenset({*EXPLANATIONS, "$schema", "$id", "default", "examples", "deprecated", "readOnly", "writeOnly"})
# Keys next to a parameter's own: definitions that it may refer to.
DEFINITIONS = ("$defs", "definitions")
_STRING_KEYS = {"type", "enum", "const", "minLength", "maxLength", "pattern", *DEFINITIONS}
# The lexer keeps a dozen states for each counted character of a string. With vocabularies of 260,000 tokens and the
# states that a grammar may have, strings of 1,500 counted characters in all were fine and 2,000 were not.
MAX_COUNTED = 1024
# A minimum costs the compiler fuel, too.
MAX_LEAST = 512
_END = "\n</parameter>\n"


def _other_beginnings(words: Mapping[str, str | None]) -> str:
    """Return a regular expression for texts without `<` that begin with none of the words.

    A word's value is what may follow it all the same. Written out, because the lexer needs far more states for "none
    of these" than for this.
    """
    tails: dict[str, dict[str, str | None]] = {}
    for word, after in words.items():
        tails.setdefault(word[0], {})[word[1:]] = after
    found = [rf"[^<{''.join(map(regex_of, tails))}][^<]*"]
    for first, rest in tails.items():
        after = rest.get("")
        if "" not in rest:
            found.append(f"{regex_of(first)}({_other_beginnings(rest)})?")
        elif after is not None:
            found.append(f"{regex_of(first)}({after})")
    return "|".join(found)


def _text_without_ends() -> str:
    """Return a regular expression for texts without `VALUE_ENDS`: `</parameter>`, `</function>` and `</tool_call>`.

    Such a text is cut at each `<`. No piece begins a parameter's end; after pieces that are a function's end and
    nothing more, none begins a call's end.
    """
    assert VALUE_ENDS == ("</parameter>", "</function>\n</tool_call>", "</function></tool_call>")
    inner: dict[str, str | None] = {"/parameter>": None, "/function>": r"[^<\n][^<]*|\n[^<]+"}
    closed = r"(<\/function>\n?)+"
    piece, after = _other_beginnings(inner), _other_beginnings({**inner, "/tool_call>": None})
    return rf"[^<]*(<({piece})?|{closed}<({after})?)*({closed})?"


NO_ENDS = _text_without_ends()


def tagged_value(rules: Rules, schema: Schema, json_rule: JsonRule, refuse: Refuse | None) -> str:
    """Return a value in tags, and its end. Strings have no quotes; other values are JSON.

    Raises what `refuse` returns if the value of a string cannot be enforced; without `refuse` it is then free.
    """
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" not in kinds:
        return f"{json_rule(schema)} {rules.literal(_END)}"
    unknown = sorted(set(schema) - _STRING_KEYS - ANNOTATIONS)
    if refuse is not None and unknown:
        raise refuse(f"this model's calls write strings without quotes, where {unknown[0]!r:.80} is not supported")
    if "enum" in schema or "const" in schema:
        if refuse is not None and "pattern" in schema:
            raise refuse("an unquoted string cannot have both pattern and enum or const; keep one")
        options = _options(schema, kinds)
        if options:
            return f"({' | '.join(map(json.dumps, options))}) {rules.literal(_END)}"
        if refuse is not None:
            raise refuse("none of a string's values can be written in this model's calls")
    return rules.until(_END, _string(rules, schema, kinds, refuse))


def _string(rules: Rules, schema: Schema, kinds: Sequence[Any], refuse: Refuse | None) -> str:
    """Return the terminal for the strings of a schema."""
    # One type of several: the parser reads the word null as null.
    null = "null" if len(kinds) > 1 else ""
    shapes, counted = [NO_ENDS], 0
    for read in (_length, _pattern):
        try:
            shape = read(schema)
        except ValueError as error:
            if refuse is not None:
                raise refuse(str(error)) from None
            continue
        if shape is not None:
            shapes.append(f"{shape.regex}|null" if null and "null" in kinds else shape.regex)
            counted += shape.size
    other_than = null if "null" not in kinds else ""
    if not rules.affords(counted, MAX_COUNTED):
        if refuse is not None:
            raise refuse(
                f"lengths and patterns of unquoted strings must have at most {MAX_COUNTED} counted characters in all"
            )
        shapes = shapes[:1]
    return rules.text(shapes=shapes, other_than=other_than)


def _options(schema: Schema, kinds: Sequence[Any]) -> list[str]:
    """Return the values of an enumeration that the parser reads back as themselves."""
    stated = schema.get("enum")
    values = list(stated) if isinstance(stated, list) else [schema.get("const")]
    if "const" in schema:
        values = [each for each in values if each == schema["const"]]
    found = [each for each in values if isinstance(each, str) and not any(end in each for end in VALUE_ENDS)]
    found = [each for each in found if _has_length(each, schema)]
    if len(kinds) > 1:
        found = [each for each in found if each != "null"]
        found += ["null"] if None in values and "null" in kinds else []
    return found


def _has_length(text: str, schema: Schema) -> bool:
    least, most = schema.get("minLength", 0), schema.get("maxLength", len(text))
    return type(least) is not int or type(most) is not int or least <= len(text) <= most


def _length(schema: Schema) -> Translated | None:
    """Return a regular expression for strings of a schema's lengths. Raises ValueError if there is none."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    # `True` is an int to Python and no number in JSON.
    if type(least) is not int or not 0 <= least <= MAX_LEAST:
        raise ValueError(f"minLength of an unquoted string must be an integer from 0 to {MAX_LEAST}")
    if "maxLength" in schema and (type(most) is not int or not least <= most <= MAX_COUNTED):
        raise ValueError(f"maxLength of an unquoted string must be an integer from {least} to {MAX_COUNTED}")
    if not least and most is None:
        return None
    return Translated(rf"(.|\n){{{least},{'' if most is None else most}}}", least if most is None else most)


def _pattern(schema: Schema) -> Translated | None:
    """Return a regular expression for strings with a schema's pattern. Raises ValueError if there is none."""
    if "pattern" not in schema:
        return None
    pattern = schema["pattern"]
    if not isinstance(pattern, str):
        raise ValueError("pattern of an unquoted string must be a string")
    try:
        return translate(pattern)
    except ValueError as error:
        raise ValueError(f"pattern {pattern!r:.80} of an unquoted string is not supported: {error}") from None


def any_parameters(rules: Rules) -> str:
    """Return any parameters in tags."""
    value = rules.until("</parameter>", rules.text(shapes=[NO_ENDS]))
    return rf'("<parameter=" /[^<>\n]{{1,64}}/ ">" {value} /\n?/)*'


def python_value(schema: Schema, json_rule: JsonRule) -> str:
    """Return a keyword argument's value: Python's words for truth, otherwise JSON, which the parser reads too."""
    if schema.get("type") == "boolean" and not set(schema) - {"type", *DEFINITIONS} - ANNOTATIONS:
        return '("True" | "False")'
    return json_rule(schema)


def any_pairs(rules: Rules) -> str:
    """Return any keyword arguments."""
    value = rules.next_name()
    text = r"""/"([^"\\]|\\(.|\n))*"/ | /'([^'\\]|\\(.|\n))*'/"""
    word = '/-?[0-9]+(\\.[0-9]+)?([eE][+-]?[0-9]+)?/ | "True" | "False" | "None" | "true" | "false" | "null"'
    items = f'"[" ({value} (", " {value})*)? "]"'
    members = f'"{{" ({value} ": " {value} (", " {value} ": " {value})*)? "}}"'
    assert rules.add(f"{text} | {word} | {items} | {members}") == value
    pair = rules.add(f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {value}')
    return f'({pair} (", " {pair})*)?'
