"""Stories that somebody begins and the model continues: the same hero, thing and place, and a way out."""

from __future__ import annotations

from random import Random

from weft_training.made import cast
from weft_training.made.exchange import Exchange, Maker, one
from weft_training.made.wording import asked, chosen, filled, slots_of, table

PROMPTS = (
    "Continue the story: {0}|Continue the story: {0}|Continue this story: {0}|Please continue the story: {0}|"
    "Finish this story: {0}|How does this story go on? {0}|Go on with this story: {0}|Can you continue this story? {0}|"
    "{0} Continue the story.|{0} What happened next?|{0} Please go on.|{0} How does the story go on?|"
    'Continue: "{0}"|Write the end of this story: {0}'
)
KIN = ["grandmother", "grandfather", "brother", "sister", "mother", "father", "uncle", "aunt"]


def prompt(random: Random, begin: str) -> str:
    """
    >>> prompt(Random(3), "There was a cat.").count("There was a cat.")
    1
    """
    return asked(random, chosen(random, PROMPTS).replace("{0}", begin))


def continuation(random: Random) -> Exchange:
    """The scenes share one opening, so it is drawn more often than the others."""
    table_ = table("continuations")
    openings = table_["opening"]
    entry = random.choices(openings, [14 if "{scene}" in each["begin"] else 1 for each in openings])[0]
    rest = random.choice(entry["rest"])
    name, which, _ = cast.person(random)
    friend = next(each for each in iter(lambda: cast.person(random)[0], "") if each != name)
    slots = {"name": name, "friend": friend, "kin": random.choice(KIN), **cast.pronouns(which)}
    slots["He"] = slots["he"].capitalize()
    slots |= {
        "somebody": random.choice(["a hiker", "a shepherd"]),
        "town": random.choice(["village", "town", "street"]),
    }
    slots |= slots_of(random, table_["slots"], entry["begin"] + rest + "{wide}")
    slots = {key: text.replace("{wide}", slots["wide"]) for key, text in slots.items()}
    slots["scene_place2"] = slots.get("scene_place", "").capitalize()
    return prompt(random, filled(random, entry["begin"], slots)), filled(random, rest, slots)


MAKERS: dict[Maker, float] = {one(continuation): 2}
