"""Separates a model's reasoning from its answer. Reasoning comes first, between markers that differ by family."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import OptionError
from weft.text.answer_parts import AnswerPart
from weft.text.formats.harmony import MARKERS, harmony
from weft.text.formats.json_calls import SPACE
from weft.text.parsing import TextParser
from weft.text.scanner import Reading, Scanner, without_space


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers around the reasoning, and around the answer if a family has them. They may be special tokens."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    answer: tuple[str, str] | None = None


STYLES = {
    "think": ReasoningMarkers(("<think>",), ("</think>",)),
    "mistral": ReasoningMarkers(("[THINK]",), ("[/THINK]",)),
    "granite": ReasoningMarkers(
        ("<think>", "Here is my thought process:", "Here's my thought process:"),
        ("</think>", "Here is my response:", "Here's my response:"),
        ("<response>", "</response>"),
    ),
}
REASONING = (*STYLES, "harmony")


def reasoning_for(name: str, opened: bool = False, scanner: Scanner | None = None) -> TextParser:
    """Return a parser by name. `opened`: the prompt already ends within reasoning (see `opens`)."""
    scanner = scanner or Scanner()
    if name == "harmony":
        return TextParser(scanner, harmony(scanner), MARKERS)
    if name not in STYLES:
        raise OptionError(f"reasoning_parser must be one of {', '.join(REASONING)}, got {name!r}")
    style = STYLES[name]
    markers = (*style.starts, *style.ends, *(style.answer or ()))
    return TextParser(scanner, _reasoning_first(scanner, style, opened), markers)


def opens(name: str, prompt: str) -> bool:
    """Return whether a prompt, by its chat template, ends within reasoning.

    >>> opens("think", "<|assistant|><think>\\n"), opens("think", "<|assistant|><think>\\n\\n</think>\\n\\n")
    (True, False)
    """
    return name in STYLES and prompt.rstrip().endswith(STYLES[name].starts)


def detect_reasoning(template: str) -> str | None:
    """Return the reasoning style of a chat template."""
    marks = {"<|channel|>": "harmony", "[THINK]": "mistral", "my thought process": "granite", "<think>": "think"}
    return next((name for mark, name in marks.items() if mark in template), None)


def _reasoning_first(scanner: Scanner, style: ReasoningMarkers, opened: bool) -> Reading:
    space: list[str] = []
    yield from scanner.skip(SPACE, space.append)
    marker = yield from scanner.sees(*style.starts)
    if marker or opened:
        scanner.place += len(marker)
        yield from scanner.skip(SPACE)
        yield from _read_reasoning(scanner, style.ends)
        yield from scanner.skip(SPACE)
        if style.answer is not None and (yield from scanner.sees(style.answer[0])):
            scanner.place += len(style.answer[0])
            yield from scanner.skip(SPACE)
            yield from scanner.skip_to((style.answer[1],), scanner.content)
    else:
        scanner.parts.append(AnswerPart("content", "".join(space)))
    while (yield from scanner.peek()):
        scanner.parts.append(AnswerPart("content", scanner.text[scanner.place :]))
        scanner.place = len(scanner.text)


def _read_reasoning(scanner: Scanner, ends: tuple[str, ...]) -> Reading:
    held: list[str] = []
    if not (yield from scanner.skip_to(ends, lambda text: scanner.reasoning(without_space(text, held)))):
        scanner.reasoning("".join(held))
