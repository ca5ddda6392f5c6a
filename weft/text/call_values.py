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
from weft.text.grammar import EXPLANATIONS
from weft.text.lark_rules import Rules, regex_of

# Keys of a schema that constrain nothing.
ANNOTATIONS = frozenset({*EXPLANATIONS, "$schema", "$id", "default", "examples", "deprecated", "readOnly", "writeOnly"})
# Keys next to a parameter's own: definitions that it may refer to.
DEFINITIONS = ("$defs", "definitions")
_STRING_KEYS = {"type", "enum", "const", "minLength", "maxLength", *DEFINITIONS}
# A minimum costs the compiler fuel for each character. Where a string may end, the lexer keeps an expression for each
# length that is left: more than about 50 exhaust it in the middle of an answer.
_MAX_LEAST = 512
_MAX_SPAN = 32
_END = "\n</parameter>\n"

Schema = Mapping[str, Any]
JsonRule = Callable[[Schema], str]
Refuse = Callable[[str], InvalidField]


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
        options = _options(schema, kinds)
        if options:
            return f"({' | '.join(map(json.dumps, options))}) {rules.literal(_END)}"
        if refuse is not None:
            raise refuse("none of a string's values can be written in this model's calls")
    # One type of several: the parser reads the word null as null.
    not_null = "null" if len(kinds) > 1 and "null" not in kinds else ""
    text = rules.text(tuple(map(regex_of, VALUE_ENDS)), shape=_shape(schema, refuse), other_than=not_null)
    return rules.until(_END, text)


def _options(schema: Schema, kinds: Sequence[Any]) -> list[str]:
    """Return the values of an enumeration that the parser reads back as themselves."""
    stated = schema.get("enum")
    values = list(stated) if isinstance(stated, list) else [schema.get("const")]
    if "const" in schema:
        values = [each for each in values if each == schema["const"]]
    found = [each for each in values if isinstance(each, str) and not any(end in each for end in VALUE_ENDS)]
    if len(kinds) > 1:
        found = [each for each in found if each != "null"]
        found += ["null"] if None in values and "null" in kinds else []
    return found


def _shape(schema: Schema, refuse: Refuse | None) -> str:
    """Return a regular expression for strings of a schema's lengths.

    Raises what `refuse` returns if a length cannot be enforced; without `refuse` it is ignored.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    # `True` is an int to Python and no number in JSON.
    if type(least) is not int or not 0 <= least <= _MAX_LEAST:
        if refuse is not None:
            raise refuse(f"minLength of an unquoted string must be an integer from 0 to {_MAX_LEAST}")
        least = 0
    if "maxLength" in schema and (type(most) is not int or not 0 <= most - least <= _MAX_SPAN):
        if refuse is not None:
            raise refuse(f"maxLength of an unquoted string must be an integer from {least} to {least + _MAX_SPAN}")
        least, most = (0 if type(most) is int and most < least else least), None
    return rf"(.|\n){{{least},{'' if most is None else most}}}"


def any_parameters(rules: Rules) -> str:
    """Return any parameters in tags."""
    value = rules.until("</parameter>", rules.text(tuple(map(regex_of, VALUE_ENDS))))
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
