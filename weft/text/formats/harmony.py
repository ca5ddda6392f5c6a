"""gpt-oss's answers: messages on channels. Analysis is reasoning, messages to a function are tool calls, the rest is
content.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"x": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from weft.text.reader import Malformed, Reader, Reading

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BEGINNINGS = ("<|start|>", "<|channel|>", " to=functions.", "to=functions.")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(reader: Reader) -> Reading:
    """Read an answer. The prompt ends where a header begins, so the answer begins inside one."""
    while (yield from reader.peek()):
        header: list[str] = []
        if (yield from reader.sees(*_BEGINNINGS)):
            marker = yield from reader.skip_to(("<|message|>", *_ENDS[:-1]), header.append)
            if marker != "<|message|>":
                reader.content("".join(header))
                continue
        if (yield from reader.skip_to(_ENDS, _shown_as(reader, "".join(header)))) == "<|start|>":
            reader.place -= len("<|start|>")


def _shown_as(reader: Reader, header: str) -> Callable[[str], None]:
    """Return what a message's text is, by its header."""
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient is not None:
        try:
            reader.begin_call(recipient.group(1))
        except Malformed:
            return reader.content
        return reader.arguments
    return reader.reasoning if channel is not None and channel.group(1) == "analysis" else reader.content
