"""Words for the frames of dialogues: articles, plurals, lists, and questions as people type them."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

TABLES = Path(__file__).parent / "tables"
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six"]
PLURALS = {
    "mouse": "mice", "sheep": "sheep", "fish": "fish", "goldfish": "goldfish", "deer": "deer", "goose": "geese",
    "wolf": "wolves", "leaf": "leaves", "knife": "knives", "shelf": "shelves", "tooth": "teeth", "foot": "feet",
    "scarf": "scarves", "cactus": "cacti", "potato": "potatoes", "tomato": "tomatoes", "mosquito": "mosquitoes",
    "volcano": "volcanoes", "child": "children", "bookshelf": "bookshelves", "spacecraft": "spacecraft",
    "aircraft": "aircraft", "postman": "postmen", "fireman": "firemen", "snowman": "snowmen", "stomach": "stomachs",
}  # fmt: skip


@cache
def table(name: str) -> dict[str, Any]:
    return tomllib.loads((TABLES / f"{name}.toml").read_text(encoding="ascii"))


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def small(text: str) -> str:
    return text if text.startswith("I ") else text[0].lower() + text[1:]


def article(word: str) -> str:
    """
    >>> article("owl"), article("cat"), article("uniform"), article("hour")
    ('an owl', 'a cat', 'a uniform', 'an hour')
    """
    an = (word[0] in "aeiou" and not word.startswith(("uni", "uku", "use", "eu"))) or word.startswith(("hour", "X-ray"))
    return ("an " if an else "a ") + word


def plural(word: str) -> str:
    """
    >>> plural("cherry"), plural("police officer"), plural("box"), plural("leaf")
    ('cherries', 'police officers', 'boxes', 'leaves')
    """
    if word in PLURALS:
        return PLURALS[word]
    if word[-1] == "y" and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def listed(items: list[str], word: str = "and") -> str:
    return ", ".join(items[:-1]) + f" {word} " + items[-1]


def spoken(random: Random, said: str) -> str:
    """A question or a request as people type it: politely, shortly, without capital or mark."""
    if "colour" in said and random.random() < 0.5:
        said = said.replace("colour", "color")
    end, way = said[-1], random.random()
    if way < 0.6:
        return said
    if way < 0.72:
        return small(said[:-1]) + random.choice(["", end])
    if way < 0.78:
        return said[:-1]
    if said.startswith(("Can you", "Do you", "I ")):
        return random.choice(["Hi! ", "Hello! ", ""]) + said
    if end == "?":
        before = ["I have a question: ", "Please tell me: ", "Quick question: ", "Hi, ", "Hello! ", "Can you help me? ",
                  "So, ", "One more thing: ", "My child asks: ", "Okay, "]  # fmt: skip
        first = random.choice(before)
        return first + (said if first[-2] in "!?" else small(said))
    way_of_asking = random.choice(["Please {}.", "{}, please.", "Can you {}?", "Could you {}?", "Could you please {}?",
                                   "Now {}.", "Can you {}, please?", "I would like you to {}."])  # fmt: skip
    return capital(way_of_asking.format(small(said[:-1])))


def leading(name: str, fact: str) -> str:
    """The thing named where a sentence begins with a pronoun.

    >>> leading("a cat", "It purrs."), leading("a cat", "A young cat is a kitten.")
    ('A cat purrs.', 'A young cat is a kitten.')
    """
    first, _, rest = fact.partition(" ")
    return f"{capital(name)} {rest}" if first in ("It", "They") else fact
