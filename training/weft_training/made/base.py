"""Simple questions with their answer as one word and as one sentence, to be said in any manner."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from weft_training.made.asking import asked, table
from weft_training.made.facts import COLOURS, USES


@dataclass(frozen=True, slots=True)
class Base:
    question: str
    word: str  # the answer in a word
    sentence: str  # in a sentence, that has no capital and no full stop yet


def drawn(random: Random) -> Base:
    return random.choice([capital_city, opposite, sum_of, colour, thing, thing, use, yes_or_no])(random)


def capital_city(random: Random) -> Base:
    country, city = random.choice([pair for pair in table("words")["capitals"].items() if " " not in pair[1]])
    said = asked(random, f"What is the capital of {country}?", f"Which city is the capital of {country}?")
    return Base(said, city, f"the capital of {country} is {city}")


def opposite(random: Random) -> Base:
    word, found = random.choice(list(table("words")["opposite"].items()))
    return Base(asked(random, f"What is the opposite of {word}?"), found, f"the opposite of {word} is {found}")


def sum_of(random: Random) -> Base:
    a, b = random.randint(1, 12), random.randint(1, 12)
    name, result = random.choice([("plus", a + b), ("times", a * b)])
    said = asked(random, f"What is {a} {name} {b}?", f"How much is {a} {name} {b}?")
    return Base(said, str(result), f"{a} {name} {b} is {result}")


def colour(random: Random) -> Base:
    what, found = random.choice(sorted(COLOURS.items()))
    said = asked(random, f"What colour is {what}?", f"What color is {what}?")
    return Base(said, found, f"{what} is {found}")


def thing(random: Random) -> Base:
    what, told = random.choice(list(table("instructions")["things"].items()))
    said = asked(random, f"What is {what}?", f"What is {what}?", f"Tell me what {what} is.", f"Explain what {what} is.")
    head = told.split()[1] if told.split()[0] in ("a", "the", "an") else told.split()[0]
    return Base(said, HEADS.get(what, head), f"{what} is {told}")


def use(random: Random) -> Base:
    what, purpose = random.choice(sorted(USES.items()))
    mine = purpose.replace("yourself", "myself").replace("your", "my")
    said = asked(random, f"What do I need to {mine}?", f"What can I use to {mine}?")
    return Base(said, what.split()[-1], f"you need {what} to {purpose}")


def yes_or_no(random: Random) -> Base:
    what, (right, wrong) = random.choice(list(table("words")["facts"].items()))
    if random.random() < 0.5:
        return Base(asked(random, f"Is {what} {right}?"), "yes", f"yes, {what} is {right}")
    return Base(asked(random, f"Is {what} {wrong}?"), "no", f"no, {what} is not {wrong}")


# What a thing is in one word, where the second word of its description does not tell.
HEADS = {
    "a bridge": "way", "a castle": "house", "an island": "land", "a desert": "place", "a forest": "place",
    "a mountain": "hill", "a river": "stream", "a cloud": "drops", "a star": "ball", "a planet": "ball",
    "a book": "pages", "a telescope": "tool", "a ship": "boat", "an anchor": "iron", "a poem": "text", "honey": "food",
    "a friend": "somebody", "a train": "vehicle", "a cat": "animal", "a frog": "animal", "a whale": "animal",
    "snow": "ice", "a key": "tool", "a mirror": "glass", "a clock": "device",
}  # fmt: skip
