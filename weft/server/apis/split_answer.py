"""Splits an assistant's answer as it grows into reasoning, text and tool calls, and keeps them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol

from weft.text.answer_parts import AnswerPart


class Parser(Protocol):
    """Parses one answer in the format of a model family."""

    def feed(self, text: str) -> list[AnswerPart]: ...

    def finish(self) -> list[AnswerPart]: ...


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class SplitAnswer:
    """Takes the text of one answer. Not `parallel`: tool calls after the first are dropped, as is unwanted reasoning.

    `forced`: the answer is a tool call, so any other part is a call that was cut short, and is dropped.
    """

    def __init__(self, parser: Parser, parallel: bool = True, reasoning: bool = True, forced: bool = False) -> None:
        self.calls: list[ToolCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._parser = parser
        self._parallel = parallel
        self._wants_reasoning = reasoning
        self._forced = forced

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def broken_off(self) -> bool:
        """Return whether the arguments of the last call are not JSON, as in a call that was cut short."""
        try:
            json.loads(self.calls[-1].arguments if self.calls else "{}")
        except (ValueError, RecursionError):
            return True
        return False

    def feed(self, text: str) -> list[AnswerPart]:
        return self._note(self._parser.feed(text)) if text else []

    def finish(self) -> list[AnswerPart]:
        """Finish parsing: no text follows."""
        return self._note(self._parser.finish())

    def _note(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        kept = [part for part in parts if self._wanted(part)]
        for part in kept:
            if part.kind == "content":
                self._content.append(part.text)
            elif part.kind == "reasoning":
                self._reasoning.append(part.text)
            else:
                if part.name is not None:
                    self.calls.append(ToolCall(part.id or "", part.name))
                self.calls[part.call].pieces.append(part.text)
        return kept

    def _wanted(self, part: AnswerPart) -> bool:
        if part.kind == "tool_call":
            return self._parallel or part.call == 0
        return self._wants_reasoning if part.kind == "reasoning" else not self._forced
