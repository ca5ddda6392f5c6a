"""An assistant's answer taken apart as it grows, and remembered: what it thought, what it says, what it calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from weft.text.parts import Part


class Parser(Protocol):
    """Reads one answer in the format of a model family."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


@dataclass(slots=True)
class Call:
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class Parts:
    """Feed it the text of one answer. Not `parallel`: calls after the first are dropped, as are unwanted thoughts."""

    def __init__(self, parser: Parser, parallel: bool = True, reasoning: bool = True) -> None:
        self.calls: list[Call] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._parser = parser
        self._parallel = parallel
        self._wants_reasoning = reasoning

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def feed(self, text: str) -> list[Part]:
        return self._note(self._parser.feed(text)) if text else []

    def finish(self) -> list[Part]:
        """No text follows."""
        return self._note(self._parser.finish())

    def _note(self, parts: list[Part]) -> list[Part]:
        kept = [part for part in parts if self._wanted(part)]
        for part in kept:
            if part.kind == "content":
                self._content.append(part.text)
            elif part.kind == "reasoning":
                self._reasoning.append(part.text)
            else:
                if part.name is not None:
                    self.calls.append(Call(part.id or "", part.name))
                self.calls[part.call].pieces.append(part.text)
        return kept

    def _wanted(self, part: Part) -> bool:
        if part.kind == "tool_call":
            return self._parallel or part.call == 0
        return part.kind == "content" or self._wants_reasoning
