"""One turn of a conversation, whichever API asked for it: its prompt, the form of its answer, and who reads that."""

from __future__ import annotations

from typing import Any

from weft.base.grammar import Grammar
from weft.server.front import Front
from weft.server.parts import Parts
from weft.text.prompts import Tokens


class Turn:
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
        self.grammar = grammar
        self.reasoning = reasoning
        self.skip_special = True

    async def render(self) -> tuple[Tokens, tuple[int, ...]]:
        return await self.front.render(self.messages, self.tools or None, self.variables)

    def parts(self) -> Parts:
        """A reader of one answer."""
        return Parts()
