"""How people type a request: politely or in haste, with and without a question mark; and small helpers of wording."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
KEPT = ("I ", "I'", "I,")


def asked(random: Random, *forms: str) -> str:
    """One of the forms, as somebody might type it."""
    text = random.choice(forms)
    chance = random.random()
    if chance < 0.08 and not text.startswith(KEPT):
        text = text[0].lower() + text[1:]
    elif 0.08 <= chance < 0.12:
        text = text.rstrip("?. =")
    elif 0.12 <= chance < 0.16 and not text.startswith(KEPT):
        text = (text[0].lower() + text[1:]).rstrip("?. =")
    elif 0.16 <= chance < 0.22 and text.endswith("?") and "lease" not in text:
        text = text[:-1] + ", please?"
    elif 0.22 <= chance < 0.26 and text.startswith(("What is ", "Which ", "How many ", "How much ")):
        text = random.choice(["Tell me: ", "Quick question: ", "Do you know? ", "Hey, "]) + text[0].lower() + text[1:]
    return text


def ordered(random: Random, *forms: str) -> str:
    """One of some commands ("Count to ten"), as an order, a plea or a question."""
    text = random.choice(forms).rstrip(".")
    low = text[0].lower() + text[1:]
    return asked(
        random, f"{text}.", f"{text}.", f"Please {low}.", f"Can you {low}?", f"Could you {low}?", f"{text}, please.",
        f"{text}!", f"I want you to {low}.",
    )  # fmt: skip


def listed(items: Sequence[str], word: str = "and") -> str:
    """
    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return ", ".join(items[:-1]) + f" {word} " + items[-1] if len(items) > 1 else items[0]


def capital(text: str) -> str:
    """
    >>> capital("new York")
    'New York'
    """
    return text[0].upper() + text[1:]


def article(word: str) -> str:
    """
    >>> article("owl"), article("unicorn"), article("hour")
    ('an owl', 'a unicorn', 'an hour')
    """
    vowel = word[0] in "aeiou" and not word.startswith(("uni", "use", "eu", "one", "ukulele"))
    return ("an " if vowel or word.startswith("hour") else "a ") + word


def in_words(n: int) -> str:
    """
    >>> in_words(0), in_words(42), in_words(100), in_words(215)
    ('zero', 'forty-two', 'one hundred', 'two hundred and fifteen')
    """
    if n < 20:
        return SMALL[n]
    if n < 100:
        return TENS[n // 10] + (f"-{SMALL[n % 10]}" if n % 10 else "")
    rest = f" and {in_words(n % 100)}" if n % 100 else ""
    return f"{SMALL[n // 100]} hundred{rest}"


@cache
def table(name: str) -> dict[str, Any]:
    """One of the tables beside this file."""
    return tomllib.loads((Path(__file__).parent / "tables" / f"{name}.toml").read_text())
