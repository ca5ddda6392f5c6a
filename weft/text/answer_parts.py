"""Parts of an answer's text: content, reasoning, or a tool call."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, replace
from typing import Any, Literal

PartKind = Literal["content", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """`text` continues the last part of the same kind (and call); for a tool call it is a piece of its JSON arguments.

    `call` numbers the calls of an answer from 0. Only the first part of a call has its `id` and `name`.
    """

    kind: PartKind
    text: str = ""
    call: int = 0
    id: str | None = None
    name: str | None = None


def joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    """Return the parts with neighbours of one kind merged.

    >>> parts = [AnswerPart("content", "a"), AnswerPart("content", "b"), AnswerPart("reasoning", "c")]
    >>> [part.text for part in joined(parts)]
    ['ab', 'c']
    """
    groups: list[list[AnswerPart]] = []
    for part in parts:
        if groups and part.name is None and (groups[-1][0].kind, groups[-1][0].call) == (part.kind, part.call):
            groups[-1].append(part)
        elif part.text or part.name is not None:
            groups.append([part])
    # Joined once: an answer may come as one part per character.
    return [group[0] if len(group) == 1 else replace(group[0], text="".join(p.text for p in group)) for group in groups]


def as_json(value: Any) -> str:
    """Return a value as JSON that any encoding can carry. Raises `ValueError` for values that JSON cannot express.

    >>> as_json({"é": "\\ud800"}), as_json(["é"])
    ('{"\\\\u00e9": "\\\\ud800"}', '["é"]')
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def is_text(text: str) -> bool:
    """Return whether a string can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Return an id of nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
