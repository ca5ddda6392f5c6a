"""One turn of a conversation, whichever API asked for it: its prompt, the form of its answer, and who reads that."""

from __future__ import annotations

from typing import Any

from weft.base.grammar import Grammar
from weft.server.errors import FieldError
from weft.server.front import Front
from weft.server.parts import Parser, Parts
from weft.text.output import output_parser
from weft.text.prompts import Tokens
from weft.text.reasoning import opens
from weft.text.tool_grammar import after_thoughts, tool_grammar

# Tokens of the prompt's end that may tell whether it opened the thoughts.
PROMPT_END = 16


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
        self._forced = choice == "required" or choice.startswith("name:")
        self._form = grammar
        if self._forced and grammar is not None:
            raise FieldError("tool_choice", "forces a call, which leaves no room for another form of the answer")
        self._prompt_end = ""

    async def render(self) -> tuple[Tokens, tuple[int, ...]]:
        tokens, snapshots = await self.front.render(self.messages, self.tools or None, self.variables)
        self._prompt_end = self.front.need_tokenizer().decode(tokens[-PROMPT_END:].tolist(), skip_special=False)
        return tokens, snapshots

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must look like, after thoughts that the prompt has opened. Known once that is rendered."""
        style, token_of = self.front.reasoning_parser, self.front.need_tokenizer().special_token
        reasoning = style if style is not None and opens(style, self._prompt_end) else None
        if self._forced:
            return tool_grammar(
                self._notation,
                self.tools,
                only=self.choice.removeprefix("name:") if self.choice.startswith("name:") else None,
                parallel=self.parallel,
                token_of=token_of,
                reasoning=reasoning,
                prompt=self._prompt_end,
            )
        if self._form is None or reasoning is None:
            return self._form
        return after_thoughts(self._form, reasoning, self._prompt_end, token_of)

    @property
    def _notation(self) -> str:
        """How the model writes calls; one that was not taught any is made to write them like most."""
        return self.front.tool_parser or "hermes"

    @property
    def shown(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        return getattr(self._parser(), "markers", frozenset())

    def parts(self) -> Parts:
        """A reader of one answer."""
        return Parts(self._parser(), self.parallel, self.reasoning)

    def _parser(self) -> Parser:
        calls = self._notation if self._forced else self.front.tool_parser
        return output_parser(self.front.reasoning_parser, calls if self.tools else None, self.tools, self._prompt_end)
