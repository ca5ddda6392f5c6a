"""The output items of a response, and the events that report their growth in the prescribed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from weft.server.front import new_name
from weft.text.answer_parts import AnswerPart

Event = tuple[str, dict[str, Any]]


class Events:
    """Takes parts of an answer. `output` has the items so far; at most the last one is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.output: list[dict[str, Any]] = []
        self._open: str | None = None  # kind of the open item
        self._call = -1
        self._grown: list[str] = []  # text of the open item
        self._numbers = count()

    def numbered(self, kind: str, fields: dict[str, Any]) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **fields}

    def take(self, parts: Iterable[AnswerPart], logprobs: list[Any] | None = None) -> list[Event]:
        """Return the events of these parts. The first text carries the scores."""
        found: list[Event] = []
        scores = list(logprobs or ())
        for part in parts:
            if self._open != part.kind or (part.kind == "tool_call" and part.call != self._call):
                found += self._close()
                found += self._begin(part)
            if part.text:
                found += self._grow(part, scores if part.kind == "content" else [])
                scores = [] if part.kind == "content" else scores
        return found

    def end(self, logprobs: list[Any] | None = None, whole: bool = True) -> list[Event]:
        """End the answer. One without parts becomes an empty message. Not `whole`: the last item was cut short."""
        found = [] if self.output else self._begin(AnswerPart("content"))
        if logprobs:
            for item in self.output:
                if item["type"] == "message":
                    item["content"][0]["logprobs"] = logprobs
        return found + self._close("completed" if whole else "incomplete")

    # one item -------------------------------------------------------------------------------------------------------

    def _begin(self, part: AnswerPart) -> list[Event]:
        self._open = part.kind
        item: dict[str, Any]
        if part.kind == "tool_call":
            self._call = part.call
            item = {"type": "function_call", "id": new_name("fc_"), "call_id": part.id, "name": part.name}
            item |= {"arguments": "", "status": "in_progress"}
        elif part.kind == "reasoning":
            item = {"type": "reasoning", "id": new_name("rs_"), "summary": [], "content": [], "status": "in_progress"}
        else:
            item = {"type": "message", "id": new_name("msg_"), "role": "assistant", "status": "in_progress"}
            item["content"] = []
        self.output.append(item)
        found = [self._about("response.output_item.added", {"item": dict(item)})]
        if part.kind != "tool_call":
            item["content"] = [_empty(part.kind)]
            found.append(self._within("response.content_part.added", {"part": _empty(part.kind)}))
        return found

    def _grow(self, part: AnswerPart, scores: list[Any]) -> Iterator[Event]:
        item = self.output[-1]
        if part.kind == "tool_call":
            self._grown.append(part.text)
            fields = {"item_id": item["id"], "delta": part.text}
            yield self._about("response.function_call_arguments.delta", fields)
        else:
            self._grown.append(part.text)
            fields = {"delta": part.text, **({"logprobs": scores} if part.kind == "content" else {})}
            yield self._within(f"response.{_word(part.kind)}.delta", fields)

    def _close(self, status: str = "completed") -> list[Event]:
        if self._open is None:
            return []
        item, kind = self.output[-1], self._open
        item["status"] = status
        text, self._grown, self._open = "".join(self._grown), [], None
        if kind == "tool_call":
            item["arguments"] = text
            fields = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            found = [self._about("response.function_call_arguments.done", fields)]
        else:
            part = item["content"][0]
            part["text"] = text
            scores = {"logprobs": part["logprobs"]} if kind == "content" else {}
            found = [
                self._within(f"response.{_word(kind)}.done", {"text": part["text"], **scores}),
                self._within("response.content_part.done", {"part": dict(part)}),
            ]
        return [*found, self._about("response.output_item.done", {"item": dict(item)})]

    def _about(self, kind: str, fields: dict[str, Any]) -> Event:
        return self.numbered(kind, {"output_index": len(self.output) - 1, **fields})

    def _within(self, kind: str, fields: dict[str, Any]) -> Event:
        return self._about(kind, {"item_id": self.output[-1]["id"], "content_index": 0, **fields})


def _word(kind: str) -> str:
    return "output_text" if kind == "content" else "reasoning_text"


def _empty(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
