"""Dialogues made by rule, exact and without end: greetings, everyday knowledge, talk, stories, numbers, functions.

Every maker draws from a `random.Random` and returns exchanges that belong together; `conversation` strings some of them
together. What they say was written for this purpose: tables in facts.py and tables/, frames in the other modules.
"""

from __future__ import annotations

from random import Random

from training.made import basics
from training.made.exchange import Exchange, Maker

MAKERS: dict[Maker, float] = {**basics.MAKERS}
GREETED, PARTED = 0.18, 0.12


def conversation(random: Random) -> list[Exchange]:
    """Up to four pieces; greetings come first, farewells last. Some ask at the end what was said at first."""
    chosen = random.choices(list(MAKERS), list(MAKERS.values()), k=random.choice([1, 1, 1, 2, 2, 3, 4]))
    exchanges = [each for maker in chosen for each in maker(random)]
    if random.random() < GREETED:
        exchanges.insert(0, basics.greeting(random))
    if random.random() < PARTED:
        exchanges.append(random.choice([basics.farewell, basics.thanks])(random))
    if random.random() < 0.12:
        first, last = basics.told_and_asked(random)
        exchanges = [first, *(each for each in exchanges if "name" not in each[0]), last]
    return exchanges
