"""Splits an answer's text into parts: first reasoning from the rest, then tool calls from content."""

from __future__ import annotations

from collections.abc import Sequence

from weft.text.answer_parts import AnswerPart, joined
from weft.text.parsing import TextParser
from weft.text.reasoning import opens, reasoning_for
from weft.text.tools import Tool, parser_for


class OutputParser:
    """Combines a reasoning parser and a tool parser; either may be missing."""

    def __init__(self, reasoning: TextParser | None = None, tools: TextParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.markers = frozenset((reasoning.markers if reasoning else ()) + (tools.markers if tools else ()))

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that the text so far makes certain, beyond those returned before."""
        parts = self._reasoning.feed(text) if self._reasoning else _content(text)
        return self._calls(parts)

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts: no text follows."""
        parts = self._calls(self._reasoning.finish() if self._reasoning else [])
        return joined(parts + (self._tools.finish() if self._tools else []))

    def _calls(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        if self._tools is None:
            return parts
        found: list[AnswerPart] = []
        for part in parts:
            found += self._tools.feed(part.text) if part.kind == "content" else [part]
        return joined(found)


def _content(text: str) -> list[AnswerPart]:
    return [AnswerPart("content", text)] if text else []


def output_parser(
    reasoning: str | None, tools: str | None, declared: Sequence[Tool] = (), prompt: str = ""
) -> OutputParser:
    """Return a parser by format names. `prompt` is the end of the rendered prompt, which may open the reasoning."""
    if "harmony" in (reasoning, tools):
        # One format for both.
        return OutputParser(None, parser_for("harmony", declared))
    return OutputParser(
        None if reasoning is None else reasoning_for(reasoning, opens(reasoning, prompt)),
        None if tools is None else parser_for(tools, declared),
    )
