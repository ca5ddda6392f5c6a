"""Dialogues made by rule, exact and without end: everyday knowledge, talk, stories, numbers, words, functions.

Every maker draws from a `random.Random` and returns exchanges that belong together; `conversation` strings some of them
together. What they say was written for this purpose: tables in facts.py and tables/, frames in the other modules.
"""

from __future__ import annotations

import re
from random import Random

from training.made import basics, code, everyday, numbers, stories, talk, words
from training.made.exchange import Exchange, Maker
from training.made.facts import NAMES

# Stories and code are long, so fewer of them are enough.
SHARES = {everyday: 2.5, talk: 1.6, numbers: 1.05, words: 1.0, code: 0.85, stories: 0.65, basics: 0.1}
MAKERS: dict[Maker, float] = {
    maker: share * weight for module, share in SHARES.items() for maker, weight in module.MAKERS.items()
}
GREETED, PARTED, TOLD = 0.18, 0.12, 0.1
ASKED_BACK = 0.3
NAME = re.compile(rf"\b(?:[Mm]y name is|I am|I'm|[Cc]all me) ({'|'.join(NAMES)})\b")
NAME_QUESTIONS = ("What is my name?", "Do you remember my name?", "What was my name again?", "Do you know my name?")


def conversation(random: Random) -> list[Exchange]:
    """Up to four pieces; greetings come first, farewells last. Some ask at the end what was said at first."""
    chosen = random.choices(list(MAKERS), list(MAKERS.values()), k=random.choice([1, 1, 1, 2, 2, 3, 4]))
    exchanges = [each for maker in chosen for each in maker(random)]
    if random.random() < GREETED:
        exchanges.insert(0, basics.greeting(random))
    if random.random() < PARTED:
        exchanges.append(random.choice([basics.farewell, basics.thanks])(random))
    if random.random() < TOLD:
        first, last = basics.told_and_asked(random)
        exchanges = [first, *(each for each in exchanges if not is_personal(each[0])), last]
    return with_names(exchanges, random)


def with_names(exchanges: list[Exchange], random: Random) -> list[Exchange]:
    """Who has said his name is known by it from then on; some ask whether that is so.

    >>> with_names([("Hi, I am Ben.", "Hi Ben!"), ("What is my name?", "I do not know it.")], Random(1))[1]
    ('What is my name?', 'Your name is Ben.')
    """
    name, found = None, []
    for said, answer in exchanges:
        if name and "my name" in said.lower() and said.endswith("?"):
            answer = f"Your name is {name}."
        found.append((said, answer))
        told = NAME.search(said)
        name = told[1] if told else name
    if name and random.random() < ASKED_BACK:
        found.append((random.choice(NAME_QUESTIONS), f"Your name is {name}."))
    return found


def is_personal(said: str) -> bool:
    """Whether somebody speaks of himself: beside what he told before, that might contradict it.

    >>> is_personal("What is my name?"), is_personal("What is a name?")
    (True, False)
    """
    return any(word in {"my", "i", "i'm", "me"} for word in said.lower().replace("?", " ").split())
