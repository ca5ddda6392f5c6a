"""Tool calls as grammar rules, in the format of each model family. Written in llguidance's dialect of Lark.

A format consists of blocks: a trigger, which begins calls wherever it appears in an answer, and what follows it. Each
tool keeps its own schema, so that its references resolve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from weft.base.errors import InvalidField
from weft.text.call_values import ANNOTATIONS, DEFINITIONS, any_pairs, any_parameters, python_value, tagged_value
from weft.text.grammar_source import SPACES, without_explanations
from weft.text.lark_rules import Rules, regex_of

_JSON_KEYS = "(name|arguments|parameters|type|id|index|function)"
_SPACE = r"[ \t\r\n]*"
# Keys of a schema that a call with named parameters can follow, besides those that constrain nothing.
_NAMED_KEYS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool in a grammar. `field` is its place in the body. Without a schema, its arguments are free.

    `strict`: a schema that cannot be enforced as a whole is refused; otherwise unsupported parts are ignored.
    """

    name: str
    field: str
    schema: Mapping[str, Any] | None
    strict: bool = False

    def refuse(self, why: str) -> InvalidField:
        return InvalidField(self.field, f"cannot be enforced: {why}; change the schema or remove strict")


Write = Callable[[Rules, CallableTool], str]


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Calls after a trigger: `opening`, one call or several with `between` between them, `closing`.

    `lead` and `trail` are what a model writes around a block when it must call; `again` separates two blocks. Nothing
    can follow a block that is the `last`.
    """

    trigger: str
    write: Write
    opening: str = ""
    between: str = ""
    closing: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    trail: tuple[str, ...] = ()
    again: str = ""
    last: bool = False


@dataclass(frozen=True, slots=True)
class Notation:
    """The blocks of a format; the first one is what a model writes when it must call.

    `bare`: this block, without its trigger, may also begin an answer. `avoided` are further beginnings of calls that a
    parser accepts, as regular expressions, and `avoided_first` those at the start of an answer.
    """

    blocks: tuple[CallBlock, ...]
    bare: CallBlock | None = None
    avoided: tuple[str, ...] = ()
    avoided_first: tuple[str, ...] = ()


def notation(form: str, rules: Rules, names: Sequence[str]) -> Notation:
    """Return a format's notation. `names` are the names of the tools."""
    hermes = CallBlock("<tool_call>", _json_call("arguments"), "\n", closing=("\n", "</tool_call>"), again="\n")
    match form:
        case "qwen3_coder":
            block = CallBlock(
                "<function=", _tagged, lead=("<tool_call>", "\n"), trail=("\n", "</tool_call>"), again="\n"
            )
            return Notation((block,))
        case "lfm2":
            return Notation((_listed("<|tool_call_start|>", ("]", "<|tool_call_end|>"), _pythonic),))
        case "gemma":
            fences = (CallBlock(f"```{word}", _pythonic, "\n", "\n", ("\n```",)) for word in ("tool_code", "tool_call"))
            begun = rf"```json{_SPACE}(\[{_SPACE})?"
            words = rf"""[A-Za-z_][^ \t\r\n()\[\]{{}}"',:;]*{_SPACE}\("""
            keys = rf'\{{{_SPACE}"({_JSON_KEYS}"|[^"]*\\)'
            return Notation(tuple(fences), avoided=(begun + words, begun + keys))
        case "mistral" if rules.knows("[ARGS]"):
            return Notation((CallBlock("[TOOL_CALLS]", _mistral),))
        case "mistral":
            return Notation((_listed("[TOOL_CALLS]", ("]",)),))
        case "phi4":
            return Notation((_listed("<|tool_call|>", ("]", "<|/tool_call|>")),))
        case "olmo3":
            closing = ("\n", "</function_calls>")
            return Notation((CallBlock("<function_calls>", _pythonic, "\n", "\n", closing),))
        case "nemotron":
            return Notation((_listed("<TOOLCALL>", ("]", "</TOOLCALL>")),))
        case "granite":
            listed = _listed("<|tool_call|>", ("]",))
            return Notation((listed, hermes) if rules.knows("<|tool_call|>") else (hermes, listed))
        case "harmony":
            head = ("<|channel|>", "commentary ")
            return Notation((CallBlock("to=functions.", _harmony, lead=head, last=True),))
        case "llama3_json":
            return _llama(names)
    return Notation((hermes,))


def _listed(trigger: str, closing: tuple[str, ...], write: Write | None = None) -> CallBlock:
    return CallBlock(trigger, write or _json_call("arguments"), "[", ", ", closing)


def _llama(names: Sequence[str]) -> Notation:
    """Return Llama's notation, where an answer that begins with a call needs no trigger."""
    tagged = CallBlock("<|python_tag|>", _json_call("parameters"), between="; ", last=True)
    named = "|".join(map(regex_of, names))
    begun, others = rf"{_SPACE}\{{{_SPACE}", _JSON_KEYS.replace("name|", "")
    name = rf'"name"{_SPACE}:{_SPACE}"(({named})"|[^"]*\\)'
    return Notation((tagged,), tagged, avoided_first=(begun + name, rf'{begun}"({others}"|[^"]*\\)'))


def any_call(rules: Rules, write: Write, tools: Sequence[CallableTool]) -> str:
    """Add the rule for a call of any of the tools; return its name."""
    return rules.add(" | ".join(rules.add(write(rules, tool)) for tool in tools))


def calls(rules: Rules, block: CallBlock, call: str, parallel: bool) -> str:
    """Return what follows a block's trigger. `call` is the rule for one call."""
    several = f"{call} ({rules.literal(block.between)} {call})*" if parallel and block.between else call
    return f"{rules.literal(block.opening)} {several} {rules.literal(*block.closing)}"


# calls of one tool ----------------------------------------------------------------------------------------------------


def _schema(rules: Rules, tool: CallableTool, schema: Mapping[str, Any] | None) -> str:
    """Return a rule for JSON that follows a schema of the tool, or for any object."""
    wanted = {"type": "object"} if schema is None else without_explanations(schema)
    # Tools come from many authors: what the compiler does not support is ignored, unless the tool is strict.
    return rules.add("%json " + json.dumps({**wanted, "x-guidance": {"lenient": not tool.strict, **SPACES}}))


@cache
def _json_call(key: str) -> Write:
    def write(rules: Rules, tool: CallableTool) -> str:
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        return f'{rules.literal(head)} {_schema(rules, tool, tool.schema)} "}}"'

    return write


def _mistral(rules: Rules, tool: CallableTool) -> str:
    return f"{rules.literal(tool.name, '[ARGS]')} {_schema(rules, tool, tool.schema)}"


def _harmony(rules: Rules, tool: CallableTool) -> str:
    # The recipient may also precede the channel.
    channel = rules.literal("<|channel|>", "commentary")
    kind = f"({rules.literal('<|constrain|>', 'json')})?"
    head = f'{rules.literal(tool.name)} ({channel})? " "? {kind} {rules.literal("<|message|>")}'
    return f"{head} {_schema(rules, tool, tool.schema)}"


def _tagged(rules: Rules, tool: CallableTool) -> str:
    """Return a call whose parameters are tags, in the schema's order."""
    written, json_rule = [], partial(_schema, rules, tool)
    if tool.schema is None:
        written.append(any_parameters(rules))
    for key, each, needed in _parameters(tool):
        if tool.strict and (key != key.strip() or not 0 < len(key) <= 256 or set(key) & set(">\n")):
            raise tool.refuse(f"this model's calls cannot name the parameter {key!r:.80}")
        value = tagged_value(rules, each, json_rule, tool.refuse if tool.strict else None)
        pair = f"{rules.literal(f'<parameter={key}>' + chr(10))} {value}"
        written.append(pair if needed else f"({pair})?")
    return f"{rules.literal(f'{tool.name}>' + chr(10))} {' '.join(written)} {rules.literal('</function>')}"


def _pythonic(rules: Rules, tool: CallableTool) -> str:
    """Return a call with keyword arguments: required ones, then any of the others in order."""
    _check_word(tool, tool.name, tool.name == "print")
    if tool.schema is None:
        return f"{rules.literal(tool.name + '(')} {any_pairs(rules)} {rules.literal(')')}"
    comma, json_rule = rules.literal(", "), partial(_schema, rules, tool)
    pairs: dict[bool, list[str]] = {True: [], False: []}
    for key, each, needed in _parameters(tool):
        _check_word(tool, key)
        pairs[needed].append(f"{rules.literal(f'{key}=')} {python_value(each, json_rule)}")
    others = pairs[False]
    # tails[i]: any of the others from the i-th on, each after a comma.
    tails = [rules.add('""')]
    for other in reversed(others):
        tails.insert(0, rules.add(f"({comma} {other})? {tails[0]}"))
    if pairs[True]:
        inner = f" {comma} ".join(pairs[True]) + f" {tails[0]}"
    else:
        firsts = [f"{other} {tail}" for other, tail in zip(others, tails[1:], strict=True)]
        inner = f"({' | '.join(firsts)})?" if firsts else ""
    return f"{rules.literal(tool.name + '(')} {inner} {rules.literal(')')}"


def _check_word(tool: CallableTool, word: str, reserved: bool = False) -> None:
    """Refuse a strict tool with a name that its parser would not read as one."""
    plain = word.replace("_", "a").replace(".", "a").replace("-", "a")
    if tool.strict and (reserved or not (word[:1] + "a").replace("_", "a").isalpha() or not plain.isalnum()):
        raise tool.refuse(f"this model's calls cannot write the name {word!r:.80}")


def _parameters(tool: CallableTool) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield the name, schema (with the definitions that it may refer to) and required flag of each parameter."""
    schema = tool.schema or {}
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    properties, stated = schema.get("properties"), schema.get("required")
    found = properties if isinstance(properties, Mapping) else {}
    # A set: both lists may be long.
    required = {each for each in stated if isinstance(each, str)} if isinstance(stated, Sequence) else set()
    if tool.strict:
        _check_named(tool, schema, required - set(found))
    for key, each in found.items():
        if each is False and tool.strict:
            if key in required:
                raise tool.refuse(f"no value is allowed for the required parameter {key!r:.80}")
            continue
        yield key, {**(each if isinstance(each, Mapping) else {}), **shared}, key in required


def _check_named(tool: CallableTool, schema: Mapping[str, Any], missing: set[str]) -> None:
    unknown = sorted(key for key in schema if key not in _NAMED_KEYS and key not in ANNOTATIONS)
    if unknown:
        raise tool.refuse(f"this model's calls have named parameters, so the schema cannot have {unknown[0]!r:.80}")
    if missing:
        raise tool.refuse(f"the required parameter {sorted(missing)[0]!r:.80} has no schema in properties")
