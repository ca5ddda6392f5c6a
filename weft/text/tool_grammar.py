"""Grammars that force tool calls: the tools' JSON schemas in the format of the model's family; reasoning may precede.

Written in llguidance's dialect of Lark. Each tool keeps its own schema, so that its references resolve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.text.grammar import EXPLANATIONS, SPACES, checked_choices, checked_schema
from weft.text.reasoning import STYLES, opens
from weft.text.tools import Tool, function_of, parameters_of

MAX_TOOLS = 128
# Tools come from many authors: the compiler ignores what it does not support in their schemas.
_LENIENT = {"x-guidance": {"lenient": True, **SPACES}}
_ANYTHING = r"/(.|\n)*/"
_ANY = {"type": "object"}
_SPACE = r"/\n{0,2}/"

# Returns the id of a special token, or None.
TokenOf = Callable[[str], int | None]


def no_specials(text: str) -> int | None:
    return None


class _Rules:
    """Lark rules under construction."""

    def __init__(self, token_of: TokenOf) -> None:
        self.lines: list[str] = []
        self._token_of = token_of

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule; return its name."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any]) -> str:
        return self.add("%json " + json.dumps({**_plain(schema), **_LENIENT}))

    def literal(self, *texts: str) -> str:
        """Return texts in sequence; special tokens become token references."""
        found = [(self._token_of(text), text) for text in texts if text]
        return " ".join(json.dumps(text) if token is None else f"<[{token}]>" for token, text in found)

    def text_until(self, end: str) -> str:
        """Return a rule for any text up to and including a text or a special token."""
        if self._token_of(end) is not None:
            name = f"TEXT_{len(self.lines)}"
            self.lines.append(f"{name}: {_ANYTHING}")
            return f"{name} {self.literal(end)}"
        return self.add(_ANYTHING, f"[suffix={json.dumps(end)}]")

    def knows(self, text: str) -> bool:
        return self._token_of(text) is not None


def _plain(schema: Any) -> Any:
    """Return a schema without its explanations: only the model needs them."""
    if isinstance(schema, Mapping):
        kept = {key: each for key, each in schema.items() if not (key in EXPLANATIONS and isinstance(each, str))}
        return {key: _plain(each) for key, each in kept.items()}
    return [_plain(each) for each in schema] if isinstance(schema, list) else schema


Write = Callable[[_Rules, str, Mapping[str, Any]], str]


def tool_grammar(
    form: str,
    tools: Sequence[Tool],
    *,
    only: str | None = None,
    parallel: bool = True,
    token_of: TokenOf = no_specials,
    reasoning: str | None = None,
    prompt: str = "",
) -> Grammar:
    """Return a grammar of answers that call one of the tools (`only`: the one of that name), or several if `parallel`.

    `prompt` is the end of the rendered prompt: with `reasoning`, reasoning may come first unless the prompt has closed
    it.
    """
    named = _checked(tools, only)
    rules = _Rules(token_of)
    before, write, between, after = _notation(form, rules)
    calls = " | ".join(rules.add(write(rules, name, schema)) for name, schema in named.items())
    call = rules.add(calls)
    several = f"{call} ({rules.literal(between)} {call})*" if parallel and only is None and between else call
    reasoning_rule = _harmony_reasoning_rule(rules) if form == "harmony" else _reasoning_rule(rules, reasoning, prompt)
    return Grammar("lark", "\n".join([f"start: {reasoning_rule} {before} {several} {after}", *rules.lines]))


def _checked(tools: Sequence[Tool], only: str | None) -> dict[str, Mapping[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise InvalidField("tools", f"has {len(tools)} entries; the limit is {MAX_TOOLS}")
    named = {str(function_of(tool).get("name")): parameters_of(tool) for tool in tools}
    for place, schema in enumerate(named.values()):
        checked_schema(json.dumps(schema), f"tools[{place}].function.parameters")
    if only is not None:
        if only not in named:
            raise InvalidField("tool_choice", f"names {only!r}, which is not one of the tools")
        named = {only: named[only]}
    if not named:
        raise InvalidField("tool_choice", "forces a tool call, but the request has no tools")
    closed = {"type": "object", "additionalProperties": False}
    return {name: {**(closed if "properties" in schema else _ANY), **schema} for name, schema in named.items()}


# formats --------------------------------------------------------------------------------------------------------------


def _notation(form: str, rules: _Rules) -> tuple[str, Write, str, str]:
    """Return what precedes all calls, the writer of a call, the separator (empty: only one call), and the end."""
    if form == "qwen3_coder":
        return "", _tagged, "\n", ""
    if form == "lfm2":
        return rules.literal("<|tool_call_start|>", "["), _pythonic, ", ", rules.literal("]", "<|tool_call_end|>")
    if form == "gemma":
        return rules.literal("```tool_code\n"), _pythonic, "\n", rules.literal("\n```")
    if form == "mistral" and rules.knows("[ARGS]"):
        return "", _mistral, "", ""
    if form == "harmony":
        return "", _harmony, "", ""
    if form == "llama3_json":
        return "", _plain_json("parameters"), "; ", ""
    lists = {
        "mistral": ("[TOOL_CALLS]", ""),
        "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
        "granite": ("<|tool_call|>", ""),
    }
    if form in lists and (form != "granite" or rules.knows("<|tool_call|>")):
        start, end = lists[form]
        return rules.literal(start, "["), _plain_json("arguments"), ", ", rules.literal("]", end)
    return "", _hermes, "\n", ""


def _plain_json(key: str) -> Write:
    def write(rules: _Rules, name: str, schema: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        return f'{rules.literal(head)} {rules.schema(schema)} "}}"'

    return write


def _hermes(rules: _Rules, name: str, schema: Mapping[str, Any]) -> str:
    call = _plain_json("arguments")(rules, name, schema)
    return f"{rules.literal('<tool_call>', chr(10))} {call} {rules.literal(chr(10), '</tool_call>')}"


def _mistral(rules: _Rules, name: str, schema: Mapping[str, Any]) -> str:
    return f"{rules.literal('[TOOL_CALLS]', name, '[ARGS]')} {rules.schema(schema)}"


def _harmony(rules: _Rules, name: str, schema: Mapping[str, Any]) -> str:
    head = ("<|channel|>", f"commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>")
    return f"{rules.literal(*head)} {rules.schema(schema)}"


def _tagged(rules: _Rules, name: str, schema: Mapping[str, Any]) -> str:
    parameters = []
    for key, each, needed in _parameters(schema):
        head = rules.literal(f"<parameter={key}>\n")
        if each.get("type") == "string" and "enum" not in each:
            value = rules.text_until("\n</parameter>\n")
        else:
            value = f"{_unquoted(rules, each)} {rules.literal(chr(10) + '</parameter>' + chr(10))}"
        parameters.append(f"{head} {value}" if needed else f"({head} {value})?")
    start, end = rules.literal("<tool_call>", f"\n<function={name}>\n"), rules.literal("</function>\n", "</tool_call>")
    return f"{start} {' '.join(parameters)} {end}"


def _pythonic(rules: _Rules, name: str, schema: Mapping[str, Any]) -> str:
    """Return a call with keyword arguments: required ones, then any of the others in order."""
    found = list(_parameters(schema))
    comma = rules.literal(", ")
    needed, others = (
        [f"{rules.literal(f'{key}=')} {_python_value(rules, each)}" for key, each, must in found if must is wanted]
        for wanted in (True, False)
    )
    # tails[i]: any of the others from the i-th on, each after a comma.
    tails = [rules.add('""')]
    for other in reversed(others):
        tails.insert(0, rules.add(f"({comma} {other})? {tails[0]}"))
    if needed:
        inner = f" {comma} ".join(needed) + f" {tails[0]}"
    else:
        firsts = [f"{other} {tail}" for other, tail in zip(others, tails[1:], strict=True)]
        inner = f"({' | '.join(firsts)})?" if firsts else ""
    return f"{rules.literal(name + '(')} {inner} {rules.literal(')')}"


def _parameters(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield the name, schema (with the definitions that it may refer to) and required flag of each parameter."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, stated = schema.get("properties"), schema.get("required")
    # A set: both lists may be long.
    required = {each for each in stated if isinstance(each, str)} if isinstance(stated, Sequence) else set()
    for key, each in (properties if isinstance(properties, Mapping) else {}).items():
        yield key, {**(each if isinstance(each, Mapping) else {}), **shared}, key in required


def _unquoted(rules: _Rules, schema: Mapping[str, Any]) -> str:
    """Return a value in a format without quotes around strings."""
    options = schema.get("enum")
    if isinstance(options, Sequence) and options and all(isinstance(each, str) for each in options):
        return "(" + " | ".join(map(json.dumps, options)) + ")"
    return rules.schema(schema)


def _python_value(rules: _Rules, schema: Mapping[str, Any]) -> str:
    if schema.get("type") == "boolean":
        return '("True" | "False")'
    return rules.schema(schema)


# reasoning ------------------------------------------------------------------------------------------------------------


def _reasoning_rule(rules: _Rules, reasoning: str | None, prompt: str) -> str:
    """Return the reasoning before an answer: the rest of what the prompt opened, or an optional block."""
    if reasoning not in STYLES:
        return ""
    start, end = STYLES[reasoning].starts[0], STYLES[reasoning].ends[0]
    if opens(reasoning, prompt):
        return f"{rules.text_until(end)} {rules.add(_SPACE)}"
    if prompt.rstrip().endswith(STYLES[reasoning].ends):
        return ""
    return f"({rules.literal(start)} {rules.text_until(end)} {rules.add(_SPACE)})?"


def _harmony_reasoning_rule(rules: _Rules) -> str:
    head = rules.literal("<|channel|>", "analysis", "<|message|>")
    return f"({head} {rules.text_until('<|end|>')} {rules.literal('<|start|>', 'assistant')})?"


def after_reasoning(grammar: Grammar, reasoning: str, prompt: str, token_of: TokenOf = no_specials) -> Grammar:
    """Return the grammar for a model that reasons first: it applies to what follows the reasoning."""
    rules = _Rules(token_of)
    if reasoning == "harmony":
        before = f"{_harmony_reasoning_rule(rules)} {rules.literal('<|channel|>', 'final', '<|message|>')}"
    else:
        before = _reasoning_rule(rules, reasoning, prompt)
    if not before or grammar.kind == "lark":
        return grammar
    return Grammar("lark", "\n".join([f"start: {before} {_answer(rules, grammar)}", *rules.lines]))


def _answer(rules: _Rules, grammar: Grammar) -> str:
    if grammar.kind == "choice":
        return "(" + " | ".join(map(json.dumps, checked_choices(grammar.text))) + ")"
    if grammar.kind == "regex":
        rules.lines.append(f"ANSWER: /{regex_to_lark(grammar.text)}/")
        return "ANSWER"
    text = checked_schema(grammar.text, "json_schema") if grammar.kind == "json_schema" else '{"type": "object"}'
    schema = json.loads(text)
    spaced = {"x-guidance": SPACES, **schema} if isinstance(schema, dict) else schema
    return rules.add("%json " + json.dumps(spaced))
