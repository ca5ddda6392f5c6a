"""The content blocks of Anthropic's answers, and the events that report their growth in the prescribed order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from weft.text.answer_parts import AnswerPart

Event = tuple[str, dict[str, Any]]

# Weft does not sign reasoning: clients send it back as text, and any signature is accepted.
SIGNATURE = "unsigned"
_BEGUN: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
# kind of a part: type of its deltas, and the member that has the text
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def numbered(kind: str, index: int, **fields: Any) -> Event:
    return kind, {"type": kind, "index": index, **fields}


class Blocks:
    """Takes parts of an answer. `content` has the blocks so far; at most the last one is open.

    `shows_thinking`: otherwise blocks of thinking have no text.
    """

    def __init__(self, shows_thinking: bool = True) -> None:
        self.content: list[dict[str, Any]] = []
        self.called = False  # at least one call is complete
        self._shows_thinking = shows_thinking
        self._kind: str | None = None  # of the open block
        self._call = -1
        self._grown: list[str] = []  # text of the open block

    def take(self, parts: Iterable[AnswerPart]) -> list[Event]:
        """Return the events of these parts."""
        found: list[Event] = []
        for part in parts:
            if self._kind != part.kind or (part.kind == "tool_call" and part.call != self._call):
                found += self.end()
                found.append(self._begin(part))
            if part.text and (self._shows_thinking or part.kind != "reasoning"):
                self._grown.append(part.text)
                kind, member = _DELTAS[part.kind]
                found.append(self._delta({"type": kind, member: part.text}))
        return found

    def end(self) -> list[Event]:
        """Complete the open block, if there is one."""
        if self._kind is None:
            return []
        block, kind, text = self.content[-1], self._kind, "".join(self._grown)
        self._kind, self._grown = None, []
        found = []
        if kind == "tool_call":
            block["input"], whole = object_of(text)
            self.called |= whole
        elif kind == "reasoning":
            block |= {"thinking": text, "signature": SIGNATURE}
            found.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        else:
            block["text"] = text
        return [*found, numbered("content_block_stop", len(self.content) - 1)]

    def _begin(self, part: AnswerPart) -> Event:
        self._kind, self._call = part.kind, part.call
        if part.kind == "tool_call":
            block: dict[str, Any] = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        else:
            block = dict(_BEGUN[part.kind])
        self.content.append(block)
        return numbered("content_block_start", len(self.content) - 1, content_block=dict(block))

    def _delta(self, delta: dict[str, Any]) -> Event:
        return numbered("content_block_delta", len(self.content) - 1, delta=delta)


def object_of(text: str) -> tuple[msgspec.Raw, bool]:
    """Return arguments as JSON, verbatim, and whether they are an object. Those cut short become an empty object.

    >>> bytes(object_of('{"a": 1}')[0]), bytes(object_of('{"a": ')[0])
    (b'{"a": 1}', b'{}')
    """
    try:
        whole = isinstance(json.loads(text or "{}", parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        whole = False
    return msgspec.Raw((text or "{}").encode() if whole else b"{}"), whole


def _refuse(word: str) -> None:
    raise ValueError(word)
