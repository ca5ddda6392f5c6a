"""One turn of a conversation, whichever API asked for it: its prompt, the form of its answer, and who reads that."""

from __future__ import annotations

import json
from typing import Any

from weft.base.grammar import Grammar
from weft.server.errors import FieldError
from weft.server.front import Front
from weft.server.parts import Parser, Parts
from weft.text.formats.json_calls import json_calls
from weft.text.output import output_parser
from weft.text.parsing import TextParser
from weft.text.parts import Part, call_id
from weft.text.prompts import Tokens
from weft.text.reader import Reader

# Tokens of the prompt's end that may tell whether it opened the thoughts.
PROMPT_END = 16
MAX_FORCED_CALLS = 16


class Turn:
    """`choice` is "auto", "none", "required" or "name:" and a tool's name. A forced call is forced by a grammar."""

    def __init__(
        self,
        front: Front,
        *,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        choice: str,
        parallel: bool,
        variables: dict[str, Any],
        grammar: Grammar | None,
        reasoning: bool = True,
    ) -> None:
        self.front = front
        self.messages = messages
        self.choice = choice
        self.tools = tools if choice != "none" else []
        self.parallel = parallel
        self.variables = variables
        self.reasoning = reasoning
        forced = forced_grammar(self.tools, choice, parallel)
        if forced is not None and grammar is not None:
            raise FieldError("tool_choice", "forces a call, which leaves no room for another form of the answer")
        self.grammar = forced or grammar
        self._prompt_end = ""

    async def render(self) -> tuple[Tokens, tuple[int, ...]]:
        tokens, snapshots = await self.front.render(self.messages, self.tools or None, self.variables)
        self._prompt_end = self.front.need_tokenizer().decode(tokens[-PROMPT_END:].tolist(), skip_special=False)
        return tokens, snapshots

    @property
    def shown(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        return getattr(self._parser(), "markers", frozenset())

    def parts(self) -> Parts:
        """A reader of one answer."""
        return Parts(self._parser(), self.parallel, self.reasoning)

    def _parser(self) -> Parser:
        if self.choice == "required":
            reader = Reader()
            return TextParser(reader, json_calls(reader))
        if self.choice.startswith("name:"):
            return NamedCall(self.choice.removeprefix("name:"))
        tools = self.front.tool_parser if self.tools else None
        return output_parser(self.front.reasoning_parser, tools, self.tools, self._prompt_end)


class NamedCall:
    """The whole answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        name, self._name = self._name, None
        return [Part("tool_call", text, 0, None if name is None else call_id(), name)]

    def finish(self) -> list[Part]:
        return []


def forced_grammar(tools: list[dict[str, Any]], choice: str, parallel: bool) -> Grammar | None:
    """What a forced call looks like: the arguments of the named tool, or a list of calls."""
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if choice.startswith("name:"):
        return Grammar("json_schema", json.dumps(functions[choice.removeprefix("name:")]))
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in functions.items()
    ]
    most = MAX_FORCED_CALLS if parallel else 1
    return Grammar(
        "json_schema", json.dumps({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}})
    )
