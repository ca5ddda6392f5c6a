"""Renders the chart's templates as Helm would, for machines without Helm: the part of its language that they use.

Anything else raises, so that a template cannot use what no test has rendered.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

TAG = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*\}\}", re.DOTALL)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')


def merged(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those of a user in their place; null removes, as in Helm."""
    found = dict(values)
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = merged(found[name], value)
        else:
            found[name] = value
    return found


def render(template: str, values: Mapping[str, Any], release: str = "weft") -> str:
    """Return a rendered template."""
    parts = tokens(template)
    text = block(parts, {"Values": values, "Release": {"Name": release}}, {}, True)
    assert not parts, "an `end` or `else` without a beginning"
    return text


def tokens(template: str) -> list[tuple[str, str]]:
    """Return texts and tags in order. A dash at a tag's start drops the white space before it."""
    found, place = [], 0
    for tag in TAG.finditer(template):
        found.append(("text", template[place : tag.start()] + ("" if tag[2] else tag[1])))
        found.append(("tag", tag[3]))
        place = tag.end()
    return [*found, ("text", template[place:])]


def block(parts: list[tuple[str, str]], scope: Mapping[str, Any], names: Mapping[str, Any], shown: bool) -> str:
    """Render up to the end of this block, which stays; without `shown`, only skip it."""
    text = []
    while parts and parts[0] not in (("tag", "end"), ("tag", "else")):
        kind, content = parts.pop(0)
        if kind == "text":
            text.append(content)
        elif content.startswith("if "):
            text.append(choice(parts, scope, names, content[3:], shown))
        elif content.startswith("range "):
            text.append(loop(parts, scope, names, content[6:], shown))
        elif shown:
            text.append(shown_as(value_of(content, scope, names)))
    return "".join(text) if shown else ""


def choice(parts: Any, scope: Mapping[str, Any], names: Mapping[str, Any], condition: str, shown: bool) -> str:
    holds = bool(value_of(condition, scope, names)) if shown else False
    text = block(parts, scope, names, holds)
    if parts[0] == ("tag", "else"):
        parts.pop(0)
        text += block(parts, scope, names, shown and not holds)
    assert parts.pop(0) == ("tag", "end")
    return text


def loop(parts: Any, scope: Mapping[str, Any], names: Mapping[str, Any], header: str, shown: bool) -> str:
    variables, _, source = header.partition(" := ")
    key, value = variables.split(", ")
    # In the order of their names, as in Go.
    items = sorted(value_of(source, scope, names).items()) if shown else []
    text = "".join(block(body, scope, {**names, key: k, value: v}, True) for k, v in items for body in [list(parts)])
    block(parts, scope, names, False)
    assert parts.pop(0) == ("tag", "end")
    return text


def value_of(expression: str, scope: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    value, *filters = expression.split(" | ")
    found = call(WORD.findall(value), scope, names)
    for each in filters:
        found = FUNCTIONS[each](found)
    return found


def call(words: list[str], scope: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    first, *others = words
    if first in FUNCTIONS:
        return FUNCTIONS[first](*(call([word], scope, names) for word in others))
    assert not others, f"{words} is not supported"
    if first.startswith('"'):
        return json.loads(first)
    if first.startswith("$"):
        return names[first]
    if first.isdigit():
        return int(first)
    assert first.startswith("."), f"{first} is not supported"
    found: Any = scope
    for part in first[1:].split("."):
        found = found[part]
    return found


def shown_as(value: Any) -> str:
    """Return a value as Go prints it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


FUNCTIONS: Mapping[str, Any] = {
    "quote": lambda value: json.dumps(shown_as(value)),
    # Go writes a whole number without a point, and no spaces.
    "toJson": lambda value: json.dumps(
        int(value) if isinstance(value, float) and value.is_integer() else value, separators=(",", ":")
    ),
    "not": lambda value: not value,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b,
    "printf": lambda form, *values: form % tuple(map(shown_as, values)),
    "kindIs": lambda kind, value: isinstance(value, {"bool": bool}[kind]),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
}
