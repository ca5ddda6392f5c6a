"""Phrases with choices in them: `[a|b]` is one of the two, `{slot}` a word that is given; tables of such phrases."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

TABLES = Path(__file__).parent / "tables"
CHOICE = re.compile(r"\[([^\[\]]*)\]")
SENTENCE = re.compile(r'(^"?|[.!?] "?|\." "?)([a-z])')
BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])(?!uni|use|one|eu)")


@cache
def table(name: str) -> dict[str, Any]:
    """A file of tables/, read once."""
    return tomllib.loads((TABLES / f"{name}.toml").read_text())


def chosen(random: Random, text: str) -> str:
    """One of the choices everywhere, the innermost first; a whole text is a choice as well.

    >>> chosen(Random(0), "a [red|red] hat")
    'a red hat'
    """
    text = f"[{text}]"
    while found := CHOICE.search(text):
        text = text[: found.start()] + random.choice(found[1].split("|")) + text[found.end() :]
    return text


def tidy(text: str) -> str:
    """
    >>> tidy('he saw a owl. "what a owl!" said Tom.')
    'He saw an owl. "What an owl!" said Tom.'
    """
    text = BEFORE_VOWEL.sub(r"\1n ", text)
    return SENTENCE.sub(lambda found: found[1] + found[2].upper(), text)


def filled(random: Random, text: str, slots: Mapping[str, str]) -> str:
    """
    >>> filled(Random(0), "{who} ate a [apple|apple].", {"who": "the fox"})
    'The fox ate an apple.'
    """
    return tidy(chosen(random, text).format_map(slots))


def slots_of(random: Random, lists: Mapping[str, list[Any]], used: str) -> dict[str, str]:
    """One value for every list whose name stands in `used`; `{food2}` is another food than `{food}`.

    An entry that is a table gives its `name` under the list's name and every other key as `{list_key}`.
    """
    found: dict[str, str] = {}
    for name, values in lists.items():
        if "{" + name not in used:
            continue
        for end, value in zip(("", "2"), random.sample(values, min(2, len(values)))):
            whole = value if isinstance(value, dict) else {"name": value}
            found |= {name + end + ("" if key == "name" else f"_{key}"): part for key, part in whole.items()}
    return found


def asked(random: Random, text: str) -> str:
    """A question as people type it: sometimes in small letters or without its mark."""
    chance = random.random()
    if chance < 0.12 and not re.match(r"I\b", text):
        text = text[0].lower() + text[1:]
    if chance < 0.06 or chance > 0.93:
        text = text.rstrip("?.!")
    return text
