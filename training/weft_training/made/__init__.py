"""Dialogues made by rule, exact and without end: everyday knowledge, talk, stories, numbers, words, functions.

Every maker draws from a `random.Random` and returns exchanges that belong together; `conversation` strings some of them
together. What they say was written for this purpose: tables in facts.py and tables/, frames in the other modules.
"""

from __future__ import annotations

import re
from random import Random

from weft_training.made import basics, code, everyday, numbers, stories, talk, words
from weft_training.made.exchange import Exchange, Maker
from weft_training.made.facts import NAMES
from weft_training.made.wording import table

# Stories and code are long, so fewer of them are enough.
SHARES = {everyday: 2.5, talk: 1.6, numbers: 1.05, words: 1.0, code: 0.85, stories: 0.65, basics: 0.1}
MAKERS: dict[Maker, float] = {
    maker: share * weight for module, share in SHARES.items() for maker, weight in module.MAKERS.items()
}
GREETED, PARTED, TOLD = 0.18, 0.12, 0.1
ASKED_BACK = 0.3
KNOWN = "|".join(sorted({*NAMES, *table("cast")["girls"], *table("cast")["boys"], *table("talk")["slots"]["friend"]}))
NAME = re.compile(rf"\b(?:[Mm]y name is|I am|I'm|[Cc]all me) ({KNOWN})\b")
NAME_QUESTIONS = ("What is my name?", "Do you remember my name?", "What was my name again?", "Do you know my name?")
NAME_ASKED = re.compile(r"(?:\b(?:is|was|know|remember) my name(?: again)?|\bwho (?:am i|i am))\W*$", re.I)
# What somebody says of his own name, home, pets, family; what asks him for it.
PERSONAL = re.compile(
    r"\b(?:my|mine|our)\b|\bI(?: live| come from| am from|'m from)\b|\bI wish I had\b"
    r"|\b(?:I|we)(?: have|'ve)(?: got)? an? (?!question)|\bI want an? \w+\W*$"
    r"|\b(?:do I (?:live|have)|am I from|who am I|who I am)\b",
    re.I,
)
ASKED_FOR = re.compile(r"\bwhere (?:do you live|are you from)\b|\bwhat is your name\b|\bwho are you\?", re.I)
FAREWELL = re.compile(
    r"(?:(?:thank you, )?(?:good)?bye|good night|see you|time to sleep)\b[^,:]*$"
    r"|I(?: am going to (?:bed|sleep)| have to go (?:now|to bed))\b",
    re.I,
)


def conversation(random: Random) -> list[Exchange]:
    """Up to four pieces; greetings come first, farewells last. Some ask at the end what was said at first."""
    chosen = random.choices(list(MAKERS), list(MAKERS.values()), k=random.choice([1, 1, 1, 2, 2, 3, 4]))
    pieces = [maker(random) for maker in chosen]
    greeted = [[basics.greeting(random)]] if random.random() < GREETED else []
    parting = [basics.farewell, basics.thanks] if random.random() < PARTED else []
    if random.random() < TOLD:
        first, last = basics.told_and_asked(random)
        greeted = [] if first[0].startswith("Hello") else [piece for piece in greeted if not is_personal(piece)]
        pieces = [[first], *(piece for piece in pieces if not is_personal(piece)), [last]]
    pieces = agreeing(greeted + pieces)
    parted = [piece for piece in pieces if is_farewell(piece)]
    exchanges = with_names([each for piece in pieces if piece not in parted for each in piece], random)
    if parting and not parted:
        parted = [[random.choice(parting)(random)]]
    return exchanges + [each for piece in parted[:1] for each in piece]


def agreeing(pieces: list[list[Exchange]]) -> list[list[Exchange]]:
    """Without those in which the speaker has another name than before.

    >>> agreeing([[("I am Ben.", "Hi Ben!")], [("I am Eva.", "Hi Eva!")], [("Why?", "Because.")]])
    [[('I am Ben.', 'Hi Ben!')], [('Why?', 'Because.')]]
    """
    found: list[list[Exchange]] = []
    known: set[str] = set()
    for piece in pieces:
        names = {name for said, _ in piece for name in NAME.findall(said)}
        if len(known | names) <= 1 or not known:
            found.append(piece)
            known |= names
    return found


def with_names(exchanges: list[Exchange], random: Random) -> list[Exchange]:
    """Who has said his name is known by it from then on; some ask whether that is so.

    >>> with_names([("Hi, I am Ben.", "Hi Ben!"), ("What is my name?", "I do not know it.")], Random(1))[1]
    ('What is my name?', 'Your name is Ben.')
    >>> with_names([("My name is Victor. What is my name?", "I do not know.")], Random(1))
    [('My name is Victor. What is my name?', 'Your name is Victor.')]
    """
    name, found = None, []
    for said, answer in exchanges:
        told = NAME.search(said)
        name = told[1] if told else name
        if name and NAME_ASKED.search(said) and name not in answer:
            answer = f"Your name is {name}."
        found.append((said, answer))
    if name and random.random() < ASKED_BACK and not any(NAME_ASKED.search(said) for said, _ in found):
        found.append((random.choice(NAME_QUESTIONS), f"Your name is {name}."))
    return found


def is_personal(piece: list[Exchange]) -> bool:
    """Whether somebody speaks of his own name, home or friends: that might contradict what he told before.

    >>> is_personal([("What is my name?", "Ben.")]), is_personal([("Tell me what a name is.", "A word.")])
    (True, False)
    >>> is_personal([("Hi!", "Hi!"), ("I have a cat.", "How nice!")]), is_personal([("I want to know why.", "Why?")])
    (True, False)
    """
    return any(PERSONAL.search(said) or NAME.search(said) or ASKED_FOR.search(answer) for said, answer in piece)


def is_farewell(piece: list[Exchange]) -> bool:
    """
    >>> is_farewell([("Thank you, bye!", "Bye!")]), is_farewell([("Say good night in French.", "Bonne nuit.")])
    (True, False)
    """
    return any(FAREWELL.match(said) for said, _ in piece)
