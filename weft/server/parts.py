"""An assistant's answer taken apart as it grows, and remembered: what it thought, what it says, what it calls."""

from __future__ import annotations

from dataclasses import dataclass
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
    arguments: str = ""


class Parts:
    """Feed it the text of one answer; without a parser, all of it is content."""

    def __init__(self, parser: Parser | None = None) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []
        self._parser = parser

    def feed(self, text: str) -> list[Part]:
        if self._parser is None:
            return self._note([Part("content", text)] if text else [])
        return self._note(self._parser.feed(text))

    def finish(self) -> list[Part]:
        """No text follows."""
        return [] if self._parser is None else self._note(self._parser.finish())

    def _note(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning":
                self.reasoning += part.text
            else:
                if part.name is not None:
                    self.calls.append(Call(part.id or "", part.name))
                self.calls[part.call].arguments += part.text
        return parts
