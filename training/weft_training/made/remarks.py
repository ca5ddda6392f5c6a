"""Remarks about what somebody does, did or will do, answered with his own words and asked back later."""

from __future__ import annotations

from random import Random

from weft_training.made.exchange import Exchange, Maker
from weft_training.made.wording import asked, filled, table

PAST = ["yesterday", "this morning", "last night", "last week", "on Sunday", "last summer", "two days ago"]
NEXT = ["tomorrow", "tonight", "this evening", "next week", "on Saturday", "next summer", "later"]
WHO = ["brother", "sister", "mother", "father", "friend", "neighbour", "uncle", "aunt", "cousin", "grandmother"]


def to_you(text: str) -> str:
    """What somebody says of himself, said to him.

    >>> to_you("fed my cat")
    'fed your cat'
    """
    return text.replace("my ", "your ")


def remark(random: Random) -> list[Exchange]:
    turns = random.choice(table("talk")["remark"])["turns"]
    wholes = table("talk")["doing"]
    doing, other = random.sample(wholes, 2)
    used = " ".join(said + answer for said, answer in turns)
    if "{who}" in used or "{friend}" in used:
        doing = random.choice([each for each in wholes if "my " not in each["name"] and "friend" not in each["name"]])
    slots = dict(doing) | {f"{key}_you": to_you(text) for key, text in doing.items()}
    slots |= {f"other_{key}": text for key, text in other.items()} | {"other_ing_you": to_you(other["ing"])}
    slots |= {"past_when": random.choice(PAST), "next_when": random.choice(NEXT), "who": random.choice(WHO)}
    slots |= {"ing_plain": doing["ing"], "friend": random.choice(table("talk")["slots"]["friend"])}
    length = random.randint(1, len(turns))
    return [
        (asked(random, filled(random, said, slots)), filled(random, answer, slots)) for said, answer in turns[:length]
    ]


MAKERS: dict[Maker, float] = {remark: 1.2}
