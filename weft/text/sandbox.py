"""The environment of chat templates: Jinja's sandbox, with a budget for everything that could run without end.

It counts loop iterations and calls, seconds, and the characters of all values, and refuses each before it is built if
the budget is used up. Knows nothing of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from time import monotonic
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

MAX_ROUNDS = 1 << 20
MAX_SECONDS = 5.0
# Integers that templates pass to functions: widths, counts, positions.
MAX_NUMBER = 1 << 20
MAX_BITS = 256
# Cost of a list item in characters: about what it takes.
ITEM = 64
# What follows `%` and the key of a field: flags, width, precision. And what follows a brace, up to the next one.
_PERCENT = re.compile(r"[-+ #0]*+(\*|\d*+)(?:\.(\*|\d*+))?+")
_BRACE = re.compile(r"\{([^{}]*+)(\{?)")
_DIGITS = re.compile(r"\d{4}")
# Filters and functions that chat templates do not need, and whose output or time is quadratic or worse.
WITHOUT = ("batch", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")


@dataclass(slots=True)
class Budget:
    """What one rendering may still use."""

    characters: int
    rounds: int = MAX_ROUNDS
    until: float = 0.0

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise SecurityError("a chat template may not produce more text than its budget")
        if monotonic() > self.until:
            raise SecurityError(f"a chat template may not take more than {MAX_SECONDS:g} seconds")

    def round(self, written: int) -> None:
        self.spend(written)
        self.rounds -= 1
        if self.rounds < 0:
            raise SecurityError("a chat template may not loop more often than its budget")


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget(characters: int) -> Iterator[None]:
    """Set the budget of characters for what is rendered within."""
    token = _budget.set(Budget(characters, until=monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _budget.reset(token)


def spend(characters: int) -> None:
    found = _budget.get(None)  # constants are folded once, when a template is compiled
    if found is not None:
        found.spend(characters)


def cost(value: Any) -> int:
    """Return the cost of a value: the characters of a string, more for each item of anything else."""
    if isinstance(value, str):
        return len(value)
    return ITEM * len(value) if isinstance(value, Sized) else 8


def weigh(value: Any) -> Any:
    """Charge for a value as text before it is built: a value that contains one thing many times is long as text."""
    if isinstance(value, str):
        spend(len(value))
    elif isinstance(value, Mapping):
        spend(2)
        for key, each in value.items():
            weigh(key)
            weigh(each)
    elif isinstance(value, list | tuple | set):
        spend(2 + 2 * len(value))
        for each in value:
            weigh(each)
    else:
        spend(8)
    return value


def check_number(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise SecurityError(f"a chat template may not use a count of {value:.3g}")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses private attributes and changes to arguments, as Jinja's own does, and everything beyond the budget."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_written,
        )
        del self.globals["lipsum"]
        own = {"format": _format, "indent": _indent, "join": _join, "replace": _replace, "sum": _sum, "tojson": to_json}
        self.filters = {name: _paid(each) for name, each in self.filters.items() if name not in WITHOUT} | own
        self.filters["string"] = lambda value: str(weigh(value))

    def compiled(self, source: str) -> jinja2.Template:
        tree = _Rewriter(self).visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def tick(self, written: int) -> None:
        """Charge for an iteration of a loop, or a call of a macro or block, and for the literal text that it writes."""
        found = _budget.get(None)
        if found is not None:
            found.round(written)

    def concatenated(self, *parts: Any) -> str:
        return "".join(str(weigh(part)) for part in parts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template may not compute powers")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            weigh(right)
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("a chat template may not compute with such large numbers")
        elif operator == "+":
            spend(cost(left) + cost(right))
        elif operator == "*":
            for factor, other in ((left, right), (right, left)):
                if isinstance(factor, int) and isinstance(other, Sized):
                    spend(max(factor, 0) * cost(other))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **named: Any) -> Any:
        """Charge for every call of a template except filters."""
        if obj == self.tick:
            return self.tick(*args)
        for value in (*args, *named.values()):
            check_number(value)
        # Jinja wraps formatting in a function of its own.
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(owner, str):
            args = _paid_method(owner, name, args)
        found = super().call(context, obj, *args, **named)
        spend(cost(found))
        return found


def _paid_method(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Charge for string methods whose results may be much longer than their input."""
    if name == "replace" and len(args) > 1:
        spend(_replaced(text, *args[:2]))
    elif name == "join" and args:
        items = [weigh(each) for each in args[0]]
        spend(len(text) * len(items))
        return (items,)
    elif name == "expandtabs":
        spend(text.count("\t") * max([8, *args]))
    elif name in ("format", "format_map"):
        _check_format(text)
        weigh(args)
    return args


def _paid(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of Jinja's filters whose result is not much longer than its input."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        for value in (*args[1:], *named.values()):
            check_number(value)
        found = function(*args, **named)
        spend(cost(found))
        return found

    return run


@jinja2.pass_context
def _written(context: jinja2.runtime.Context, value: Any) -> str:
    return str(weigh(value))


def _replaced(text: str, old: Any, new: Any) -> int:
    return text.count(str(old)) * len(str(new)) + len(text)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(weigh(value))
    spend(_replaced(text, old, new))
    return text.replace(str(old), str(new), -1 if count is None else count)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = [each if attribute is None else environment.getitem(each, attribute) for each in value]
    spend(len(d) * len(items))
    return str(d).join(str(weigh(each)) for each in items)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_number(width)
    space = width if isinstance(width, str) else " " * width
    lines = str(weigh(text)).split("\n")
    spend(len(space) * len(lines))
    shown = [space + line if (blank or line) and (first or place) else line for place, line in enumerate(lines)]
    return "\n".join(shown)


def _format(text: str, *args: Any, **named: Any) -> str:
    _check_format(str(text))
    weigh([*args, *named.values()])
    return str(text) % (named or args)


def _check_format(text: str) -> None:
    """Refuse widths of more than three digits, and widths that are arguments or contain another field."""
    if _wide_percents(text) or _wide_braces(text.replace("{{", "")):
        raise SecurityError("a chat template may not format with such widths")
    spend(1000 * (text.count("%") + text.count("{")))


def _wide_percents(text: str) -> bool:
    """Return whether a field has a width or a precision of four digits, or one that is an argument. One pass."""
    place = 0
    while (at := text.find("%", place)) >= 0:
        found = _PERCENT.match(text, _after_key(text, at + 1))
        assert found is not None, "the pattern also matches an empty string"
        if any(each == "*" or len(each) > 3 for each in found.groups() if each):
            return True
        # A second percent sign is literal.
        place = found.end() + text.startswith("%", found.end())
    return False


def _after_key(text: str, place: int) -> int:
    """Return the end of a field's key. Parentheses nest in it; an unclosed one extends to the end of the text."""
    if not text.startswith("(", place):
        return place
    depth = 0
    for at in range(place, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at + 1
    return len(text)


def _wide_braces(text: str) -> bool:
    """Return whether a field contains another, or four digits after its colon. One pass."""
    return any(nested or _DIGITS.search(field.partition(":")[2]) for field, nested in _BRACE.findall(text))


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, values: Iterable[Any], attribute: Any = None, start: float = 0) -> Any:
    items = [each if attribute is None else environment.getitem(each, attribute) for each in values]
    if not all(isinstance(each, int | float) for each in (start, *items)):
        raise SecurityError("a chat template may only sum numbers")
    return sum(items, start)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's HTML escapes, which no model has learned."""
    if (indent or 0) > 16 or any(len(each) > 16 for each in separators or ()):
        raise SecurityError("a chat template may not join with such a long separator")
    form: Any = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    text = json.dumps(weigh(value), **form)
    spend(len(text))
    return text


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Rewriter(NodeTransformer):
    """Adds a tick to every loop and macro of a template, and turns string concatenation into a charged call."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [nodes.Const(written)], node), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("concatenated", node.nodes, node)

    def _call(self, name: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name)
        call = nodes.Call(function, args, [], None, None, lineno=at.lineno)
        call.set_environment(self._environment)
        return call  # jinja2 annotates it with the base class
