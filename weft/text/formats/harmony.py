"""gpt-oss's answers: messages on channels. Analysis is reasoning, messages to a function are tool calls, the rest is
content.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"x": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from weft.text.scanner import JsonPieces, Malformed, Reading, Scanner

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BEGINNINGS = ("<|start|>", "<|channel|>", " to=functions.", "to=functions.")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(scanner: Scanner) -> Reading:
    """Read an answer. The prompt ends where a header begins, so the answer begins inside one."""
    while (yield from scanner.peek()):
        header: list[str] = []
        if (yield from scanner.sees(*_BEGINNINGS)):
            marker = yield from scanner.skip_to(("<|message|>", *_ENDS[:-1]), header.append)
            if marker != "<|message|>":
                scanner.content("".join(header))
                continue
        show = _shown_as(scanner, "".join(header))
        if show == scanner.arguments:
            yield from _quoted_markers(scanner)
        if (yield from scanner.skip_to(_ENDS, show)) == "<|start|>":
            scanner.place -= len("<|start|>")


def _quoted_markers(scanner: Scanner) -> Reading:
    """Read arguments while they are JSON: markers that are spelled in its strings end nothing."""
    if (yield from scanner.peek()) == "{":
        with suppress(Malformed):
            yield from scanner.json_stream(JsonPieces(scanner.arguments))


def _shown_as(scanner: Scanner, header: str) -> Callable[[str], None]:
    """Return what a message's text is, by its header."""
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient is not None:
        try:
            scanner.begin_call(recipient.group(1))
        except Malformed:
            return scanner.content
        return scanner.arguments
    return scanner.reasoning if channel is not None and channel.group(1) == "analysis" else scanner.content
