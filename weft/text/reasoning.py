"""Separates a model's reasoning from its answer. Reasoning comes first, between markers that differ by family."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import OptionError
from weft.text.formats.harmony import MARKERS, harmony
from weft.text.formats.json_calls import SPACE
from weft.text.parsing import TextParser
from weft.text.parts import AnswerPart
from weft.text.reader import Reader, Reading, without_space


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Markers around the reasoning, and around the answer if a family has them. They may be special tokens."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    answer: tuple[str, str] | None = None


STYLES = {
    "think": Thoughts(("<think>",), ("</think>",)),
    "mistral": Thoughts(("[THINK]",), ("[/THINK]",)),
    "granite": Thoughts(
        ("<think>", "Here is my thought process:", "Here's my thought process:"),
        ("</think>", "Here is my response:", "Here's my response:"),
        ("<response>", "</response>"),
    ),
}
REASONING = (*STYLES, "harmony")


def reasoning_for(name: str, opened: bool = False, reader: Reader | None = None) -> TextParser:
    """Return a parser by name. `opened`: the prompt already ends within reasoning (see `opens`)."""
    reader = reader or Reader()
    if name == "harmony":
        return TextParser(reader, harmony(reader), MARKERS)
    if name not in STYLES:
        raise OptionError(f"reasoning_parser must be one of {', '.join(REASONING)}, got {name!r}")
    style = STYLES[name]
    markers = (*style.starts, *style.ends, *(style.answer or ()))
    return TextParser(reader, _thoughts_first(reader, style, opened), markers)


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


def _thoughts_first(reader: Reader, style: Thoughts, opened: bool) -> Reading:
    space: list[str] = []
    yield from reader.skip(SPACE, space.append)
    marker = yield from reader.sees(*style.starts)
    if marker or opened:
        reader.place += len(marker)
        yield from reader.skip(SPACE)
        yield from _thoughts(reader, style.ends)
        yield from reader.skip(SPACE)
        if style.answer is not None and (yield from reader.sees(style.answer[0])):
            reader.place += len(style.answer[0])
            yield from reader.skip(SPACE)
            yield from reader.skip_to((style.answer[1],), reader.content)
    else:
        reader.parts.append(AnswerPart("content", "".join(space)))
    while (yield from reader.peek()):
        reader.parts.append(AnswerPart("content", reader.text[reader.place :]))
        reader.place = len(reader.text)


def _thoughts(reader: Reader, ends: tuple[str, ...]) -> Reading:
    held: list[str] = []
    if not (yield from reader.skip_to(ends, lambda text: reader.reasoning(without_space(text, held)))):
        reader.reasoning("".join(held))
