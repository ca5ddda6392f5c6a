"""What things belong to, and the way back from a description to the thing: frames for classes.toml and things.toml."""

from __future__ import annotations

from random import Random
from typing import Any

from weft_training.made.everyday_things import ANIMALS, MADE, Thing, grouped, things
from weft_training.made.everyday_words import article, capital, listed, plural, spoken, table
from weft_training.made.exchange import Exchange

PERSON = "job"  # a doctor has a job; nobody says that a doctor is one


def several(name: str) -> str:
    """
    >>> several("piece of furniture"), several("fruit")
    ('pieces of furniture', 'fruits')
    """
    first, _, rest = name.partition(" of ")
    return f"{plural(first)} of {rest}" if rest else plural(name)


def members(entry: dict[str, Any]) -> list[Thing]:
    return [thing for group in entry["groups"] for thing in grouped(group)]


def strangers(entry: dict[str, Any]) -> list[Thing]:
    """What surely does not belong to it: made things to living ones, and the other way round."""
    alive = entry["groups"][0] in (*ANIMALS, "fruit", "vegetable")
    groups = (*MADE, "weather", "place") if alive else (*ANIMALS, "fruit", "vegetable", "weather", "place")
    groups = (*groups, *ANIMALS) if entry["name"] in ("bird", "insect") else groups
    return [thing for thing in things() if thing.group in groups]


def class_asked(random: Random) -> list[Exchange]:
    """What is a fruit? Can you give me an example?"""
    entry: dict[str, Any] = random.choice(table("classes")["class"])
    name, what, more = entry["name"], entry["what"], entry["more"]
    one = article(name)
    said = random.choice([f"What is {one}?", f"What is {one}?", f"What are {several(name)}?", f"Explain what {one} is.",
                          f"Tell me about {several(name)}.", f"What do you know about {several(name)}?",
                          f"What does {name} mean?"])  # fmt: skip
    exchanges = [(spoken(random, said), random.choice([what, what, f"{what} {more}"]))]
    if random.random() < 0.6:
        first, *others = random.sample(members(entry), 3)
        all_of_them = listed([each.many for each in (first, *others)])
        example = f"{first.subject} {first.be} {one}." if name != PERSON else f"For example, {first.many} have a job."
        examples = f"{capital(all_of_them)} are {several(name)}." if name != PERSON else example
        exchanges.append(random.choice([
            (random.choice(["Can you give me an example?", "Give me an example.", "For example?", "Such as?",
                            "What is an example?"]),
            random.choice([example, examples, f"For example, {all_of_them}."])),
            (random.choice(["Give me some examples.", "Can you give me examples?"]), examples),
        ]))  # fmt: skip
    return exchanges


def belongs(random: Random) -> Exchange:
    """Is an apple a fruit? Is a hammer?"""
    entry: dict[str, Any] = random.choice([each for each in table("classes")["class"] if each["name"] != PERSON])
    thing = random.choice(members(entry) if random.random() < 0.55 else strangers(entry))
    one = article(entry["name"])
    asked = spoken(random, f"{capital(thing.be)} {thing.named} {one}?")
    if thing.group in entry["groups"] or entry["name"] in thing.kind.split():
        return asked, random.choice([f"Yes, {thing.named} {thing.be} {one}.", f"Yes. {thing.defined}"])
    return asked, f"No, {thing.named} {thing.be} not {one}. {capital(thing.it)} {thing.be} {thing.kind}."


def called(random: Random) -> Exchange:
    """From what it is, what it is for or how it looks to its name."""
    thing = random.choice(things())
    ways = [
        (f"What do you call {thing.kind}?", f"It is called {thing.named}."),
        (f"What is the word for {thing.kind}?", f"The word is {thing.name}."),
        (f"I am thinking of {thing.kind}. What is it?", f"I think it is {thing.named}."),
        (f"Guess what it is: {thing.kind}.", f"Is it {thing.named}? {thing.defined}"),
    ]
    if thing.use:
        ways += [
            (f"What can I use to {thing.use}?", f"You can use {thing.named} to {thing.use}."),
            (f"What do I need to {thing.use}?", f"You need {thing.named} to {thing.use}."),
            (f"I want to {thing.use}. What do I need?", f"You need {thing.named}."),
        ]
    said, answer = random.choice(ways)
    if thing.form == "plural":
        answer = (
            answer.replace("It is called", "They are called").replace("it is", "they are").replace("Is it", "Are they")
        )
    return (spoken(random, said) if said.startswith("What") else said), answer
