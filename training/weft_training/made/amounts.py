"""Measures: time and money, sides of shapes, days of months, how many of one thing are in another."""

from __future__ import annotations

from random import Random

from weft_training.made.asking import asked, capital, in_words
from weft_training.made.exchange import Exchange, Maker, one
from weft_training.made.facts import MONTHS

SHAPES = {
    "triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "heptagon": 7, "octagon": 8, "rhombus": 4,
    "parallelogram": 4, "trapezoid": 4, "nonagon": 9, "decagon": 10,
}  # fmt: skip
UNITS = (
    ("minutes", "an hour", 60), ("seconds", "a minute", 60), ("hours", "a day", 24), ("days", "a week", 7),
    ("months", "a year", 12), ("weeks", "a year", 52), ("years", "a decade", 10), ("years", "a century", 100),
    ("centimetres", "a metre", 100), ("metres", "a kilometre", 1000), ("grams", "a kilogram", 1000),
    ("cents", "a dollar", 100), ("cents", "a euro", 100), ("eggs", "a dozen", 12), ("seasons", "a year", 4),
    ("minutes", "half an hour", 30), ("minutes", "a quarter of an hour", 15), ("millimetres", "a centimetre", 10),
    ("inches", "a foot", 12), ("days", "a leap year", 366), ("days", "a normal year", 365), ("feet", "a yard", 3),
    ("letters", "the English alphabet", 26), ("players", "a football team", 11), ("strings", "a violin", 4),
    ("wheels", "a car", 4), ("wheels", "a bicycle", 2), ("planets", "our solar system", 8),
    ("millilitres", "a litre", 1000),
)  # fmt: skip
LENGTHS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)))


def hour(random: Random) -> Exchange:
    h, later = random.randint(1, 12), random.randint(1, 6)
    ends = (h + later - 1) % 12 + 1
    many = f"{later} hour{'s' * (later > 1)}"
    m = random.choice([5, 10, 15, 20, 25, 30, 40, 45])
    return random.choice(
        [(asked(random, f"It is {h} o'clock. What time is it in {many}?", f"What time is it {many} after {h} o'clock?"),
          f"It is {ends} o'clock then."),
         (asked(random, f"How many minutes are {later} hours?") if later > 1 else "How many minutes are in one hour?",
          f"{capital(in_words(later))} hour{'s are' if later > 1 else ' is'} {60 * later} minutes."),
         (asked(random, f"The train leaves at {h}:00 and takes {m} minutes. When does it arrive?"),
          f"It arrives at {h}:{m:02}."),
         (asked(random, f"A film starts at {h} o'clock and lasts {many}. When does it end?"),
          f"The film ends at {ends} o'clock.")]
    )  # fmt: skip


def money(random: Random) -> Exchange:
    price, count, unit = random.randint(1, 12), random.randint(2, 9), random.choice(["dollars", "euros", "pounds"])
    thing = random.choice(["book", "ticket", "pen", "cake", "ball", "hat", "cup", "sandwich", "toy", "pizza"])
    paid = price + random.randint(1, 20)
    cost = f"{price} {unit if price > 1 else unit[:-1]}"
    left = f"{paid - price} {unit if paid - price > 1 else unit[:-1]}"
    return random.choice(
        [(asked(random, f"A {thing} costs {cost}. How much do {count} cost?"), f"They cost {price * count} {unit}."),
         (asked(random, f"A {thing} costs {cost}. I pay with {paid} {unit}. How much do I get back?"),
          f"You get {left} back."),
         (asked(random, f"I have {paid} {unit} and spend {price}. How much is left?"), f"You have {left} left.")]
    )  # fmt: skip


def shape(random: Random) -> list[Exchange]:
    name, sides = random.choice(list(SHAPES.items()))
    word = random.choice(["sides", "corners"])
    one_of_it = ("an " if name[0] in "aeiou" else "a ") + name
    exchanges = [
        (
            asked(random, f"How many {word} does {one_of_it} have?", f"How many {word} are in {one_of_it}?"),
            random.choice([f"{capital(one_of_it)} has {in_words(sides)} {word}.", f"It has {sides} {word}."]),
        )
    ]
    if random.random() < 0.2:
        return [
            (
                asked(random, "How many sides does a circle have?", "How many corners does a circle have?"),
                "A circle is round. It has no corners.",
            )
        ]
    if random.random() < 0.35:
        other, count = random.choice(list(SHAPES.items()))
        one_of_it = ("an " if other[0] in "aeiou" else "a ") + other
        exchanges.append(
            (
                asked(random, f"And {one_of_it}?", f"What about {one_of_it}?"),
                f"{capital(one_of_it)} has {in_words(count)} {word}.",
            )
        )
    return exchanges


def month_length(random: Random) -> list[Exchange]:
    month, other = random.sample(MONTHS, 2)

    def days(of: str) -> str:
        return f"{of} has {LENGTHS[of]} days" + (", or 29 in a leap year." if of == "February" else ".")

    first = (
        asked(random, f"How many days does {month} have?", f"How many days are in {month}?", f"How long is {month}?"),
        days(month),
    )
    if random.random() < 0.4:
        return [
            first,
            (asked(random, f"And {other}?", f"What about {other}?", f"And how many does {other} have?"), days(other)),
        ]
    return [first]


def unit(random: Random) -> list[Exchange]:
    part, whole, count = random.choice(UNITS)
    verb = "There are"
    first = (
        asked(
            random,
            f"How many {part} are in {whole}?",
            f"How many {part} are there in {whole}?",
            f"How many {part} does {whole} have?",
        ),
        random.choice([f"{verb} {count} {part} in {whole}.", f"{capital(whole)} has {count} {part}."]),
    )
    others = [each for each in UNITS if each[0] == part and each[1] != whole]
    if others and random.random() < 0.4:
        _, whole, count = random.choice(others)
        return [
            first,
            (asked(random, f"And in {whole}?", f"And how many are in {whole}?"), f"{verb} {count} {part} in {whole}."),
        ]
    return [first]


MAKERS: dict[Maker, float] = {one(hour): 0.25, one(money): 0.3, shape: 0.25, month_length: 0.25, unit: 0.35}
