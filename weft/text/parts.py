"""What an answer's text turns out to be, piece by piece: content, reasoning, or a call of a tool."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, replace
from typing import Any, Literal

PartKind = Literal["content", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class Part:
    """`text` goes on where the last part of the same kind (and call) ended; of a call it is its arguments, as JSON.

    `call` counts the calls of an answer from 0. The first part of a call has its `id` and `name`, the others neither.
    """

    kind: PartKind
    text: str = ""
    call: int = 0
    id: str | None = None
    name: str | None = None


def joined(parts: list[Part]) -> list[Part]:
    """The same parts with neighbours of one kind put together.

    >>> [part.text for part in joined([Part("content", "a"), Part("content", "b"), Part("reasoning", "c")])]
    ['ab', 'c']
    """
    groups: list[list[Part]] = []
    for part in parts:
        if groups and part.name is None and (groups[-1][0].kind, groups[-1][0].call) == (part.kind, part.call):
            groups[-1].append(part)
        elif part.text or part.name is not None:
            groups.append([part])
    # Joined once: an answer may come as one part for each of its characters.
    return [group[0] if len(group) == 1 else replace(group[0], text="".join(p.text for p in group)) for group in groups]


def as_json(value: Any) -> str:
    """A value as JSON that any encoding can carry. Raises `ValueError` for what JSON cannot say.

    >>> as_json({"é": "\\ud800"}), as_json(["é"])
    ('{"\\\\u00e9": "\\\\ud800"}', '["é"]')
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def is_text(text: str) -> bool:
    """Whether it can be encoded: no half of a surrogate pair stands alone in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Nine letters and digits: what Mistral's templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
