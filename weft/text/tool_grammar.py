"""Grammars for tool calls: forced ones, and those that a model makes or leaves out; reasoning may precede both.

`call_rules.py` has the formats.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from llguidance import regex_to_lark

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.text.call_rules import CallableTool, CallBlock, any_call, calls, notation
from weft.text.grammar_source import SPACES, checked_choices, checked_schema
from weft.text.lark_rules import Rules, TokenOf, no_specials, regex_of
from weft.text.reasoning import STYLES, opens
from weft.text.tools import FORMATS, Tool, function_of, parameters_of

MAX_TOOLS = 128
_SPACE = r"/\n{0,2}/"
_BLANK = r"[ \t\r\n]*"


def tool_grammar(
    form: str,
    tools: Sequence[Tool],
    *,
    only: str | None = None,
    parallel: bool = True,
    strict: Collection[str] = (),
    token_of: TokenOf = no_specials,
    reasoning: str | None = None,
    prompt: str = "",
) -> Grammar:
    """Return a grammar of answers that call one of the tools (`only`: the one of that name), or several if `parallel`.

    `strict` are names of tools whose schemas must be enforced as a whole. `prompt` is the end of the rendered prompt:
    with `reasoning`, reasoning may come first unless the prompt has closed it.
    """
    called = _called(tools, strict)
    if only is not None:
        called = [tool for tool in called if tool.name == only]
        if not called:
            raise InvalidField("tool_choice", f"names {only!r}, which is not one of the tools")
    if not called:
        raise InvalidField("tool_choice", "forces a tool call, but the request has no tools")
    rules = Rules(token_of)
    known = notation(form, rules, [tool.name for tool in called])
    block, several = known.blocks[0], parallel and only is None
    # A block that needs no trigger is written without it.
    trigger = "" if block is known.bare else block.trigger
    rest = calls(rules, block, any_call(rules, block.write, called), several)
    whole = rules.add(f"{rules.literal(*block.lead, trigger)} {rest} {rules.literal(*block.trail)}")
    many = f"({rules.literal(block.again)} {whole})*" if several and block.again else ""
    before = _harmony_reasoning_rule(rules) if form == "harmony" else _reasoning_rule(rules, reasoning, prompt)
    return rules.grammar(f"{before} {whole} {many}")


def _called(tools: Sequence[Tool], strict: Collection[str], free: bool = False) -> list[CallableTool]:
    """Return tools for a grammar. `free`: those that are not strict take any arguments."""
    if len(tools) > MAX_TOOLS:
        raise InvalidField("tools", f"has {len(tools)} entries; the limit is {MAX_TOOLS}")
    found = []
    for place, tool in enumerate(tools):
        name, schema = str(function_of(tool).get("name")), parameters_of(tool)
        field = f"tools[{place}].function.parameters"
        checked_schema(json.dumps(schema), field)
        closed: dict[str, Any] = {"additionalProperties": False} if "properties" in schema else {}
        kept = None if free and name not in strict else {"type": "object", **closed, **schema}
        found.append(CallableTool(name, field, kept, name in strict))
    return found


# calls by choice ------------------------------------------------------------------------------------------------------


def auto_tool_grammar(
    form: str,
    tools: Sequence[Tool],
    strict: Collection[str],
    *,
    parallel: bool = True,
    token_of: TokenOf = no_specials,
    reasoning: str | None = None,
    prompt: str = "",
) -> Grammar:
    """Return a grammar of any text with any calls in it, in which calls of `strict` tools follow their schemas.

    Every beginning of a call that the parser of the format accepts is a trigger here: what follows it is a call of one
    of the tools. Special tokens other than the format's own are excluded, because an answer's text omits them: one
    inside a trigger would hide it.
    """
    called = _called(tools, strict, free=True)
    rules = Rules(token_of)
    known = notation(form, rules, [tool.name for tool in called])
    style = STYLES.get(reasoning or "")
    starts = style.starts if style else ()
    markers = {*FORMATS[form].markers, *((*starts, *style.ends, *(style.answer or ())) if style else ())}
    triggers = [block.trigger for block in known.blocks]
    avoided = [*map(regex_of, triggers), *known.avoided]
    # What begins as reasoning is reasoning.
    first = [*known.avoided_first, *(_BLANK + regex_of(start) for start in starts)]
    texts = rules.text(avoided, first), rules.text(avoided)
    # Blocks that write calls in the same way share the rule, which has all schemas.
    made = {write: any_call(rules, write, called) for write in dict.fromkeys(block.write for block in known.blocks)}
    blocks = [(block, calls(rules, block, made[block.write], parallel)) for block in known.blocks]
    body = _calls_in_text(rules, blocks, parallel, texts, rules.tokens(markers - {*triggers, *starts}))
    if known.bare is not None:
        body += f" | {rules.add(_SPACE)} {calls(rules, known.bare, made[known.bare.write], parallel)}"
    if reasoning is None or style is None:
        return rules.grammar(body)
    return rules.grammar(_free_reasoning(rules, reasoning, prompt, rules.add(body), markers))


def _calls_in_text(
    rules: Rules, blocks: Sequence[tuple[CallBlock, str]], parallel: bool, texts: tuple[str, str], marks: str
) -> str:
    """Return text with calls in it. Each block comes with what follows its trigger.

    `texts` are the terminals of the text at the start, and of any other; `marks` are special tokens that may interrupt
    it.
    """
    first, text = texts
    ends = any(block.last for block, _ in blocks)

    def call(before: str) -> str:
        return rules.add(" | ".join(f"{rules.until(block.trigger, before)} {rest}" for block, rest in blocks))

    def mark(before: str) -> str:
        return f" | {before} {marks}" if marks else ""

    if parallel and not ends:
        return f"{first} | ({call(first)}{mark(first)}) ({call(text)}{mark(text)})* {text}"
    marked = f"({text} {marks})*" if marks else ""
    after = "" if ends else f"{marked} {text}"
    found = f"{first} | {call(first)} {after}"
    return f"{found} | {first} {marks} {marked} ({text} | {call(text)} {after})" if marks else found


# reasoning ------------------------------------------------------------------------------------------------------------


def _reasoning_rule(rules: Rules, reasoning: str | None, prompt: str) -> str:
    """Return the reasoning before an answer: the rest of what the prompt opened, or an optional block."""
    if reasoning not in STYLES:
        return ""
    start, end = STYLES[reasoning].starts[0], STYLES[reasoning].ends[0]
    if opens(reasoning, prompt):
        return f"{rules.until(end)} {rules.add(_SPACE)}"
    if prompt.rstrip().endswith(STYLES[reasoning].ends):
        return ""
    return f"({rules.literal(start)} {rules.until(end)} {rules.add(_SPACE)})?"


def _free_reasoning(rules: Rules, reasoning: str, prompt: str, body: str, markers: Collection[str]) -> str:
    """Return an answer that may reason before its body, and may end while it reasons."""
    style = STYLES[reasoning]
    if prompt.rstrip().endswith(style.ends):
        return body
    begun = " | ".join(_begun(rules, start) for start in style.starts)
    text, marks = rules.text(list(map(regex_of, style.ends))), rules.tokens(set(markers) - set(style.ends))
    closed = " | ".join(rules.until(end, text) for end in style.ends)
    inside = f"{f'({text} {marks})*' if marks else ''} (({closed}) {body} | {text})"
    return inside if opens(reasoning, prompt) else f"({begun}) {inside} | {body}"


def _begun(rules: Rules, start: str) -> str:
    return f"/{_BLANK}/ {rules.literal(start)}" if rules.knows(start) else f"/{_BLANK}{regex_of(start)}/"


def _harmony_reasoning_rule(rules: Rules) -> str:
    head = rules.literal("<|channel|>", "analysis", "<|message|>")
    return f"({head} {rules.until('<|end|>')} {rules.literal('<|start|>', 'assistant')})?"


def after_reasoning(grammar: Grammar, reasoning: str, prompt: str, token_of: TokenOf = no_specials) -> Grammar:
    """Return the grammar for a model that reasons first: it applies to what follows the reasoning."""
    rules = Rules(token_of)
    if reasoning == "harmony":
        before = f"{_harmony_reasoning_rule(rules)} {rules.literal('<|channel|>', 'final', '<|message|>')}"
    else:
        before = _reasoning_rule(rules, reasoning, prompt)
    if not before or grammar.kind == "lark":
        return grammar
    return rules.grammar(f"{before} {_answer(rules, grammar)}")


def _answer(rules: Rules, grammar: Grammar) -> str:
    if grammar.kind == "choice":
        return "(" + " | ".join(map(json.dumps, checked_choices(grammar.text))) + ")"
    if grammar.kind == "regex":
        return rules.add_terminal(f"/{regex_to_lark(grammar.text)}/")
    text = checked_schema(grammar.text, "json_schema") if grammar.kind == "json_schema" else '{"type": "object"}'
    schema = json.loads(text)
    spaced = {"x-guidance": SPACES, **schema} if isinstance(schema, dict) else schema
    return rules.add("%json " + json.dumps(spaced))
