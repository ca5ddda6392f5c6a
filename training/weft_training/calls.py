"""Conversations in which a function is called: what was listed, who asks, the call, what came back, the answer.

Made by rule and written by the chat template itself, so that the model sees exactly what a server will show it. A
function goes by several names, and so do its parameters: what is called has to be read from the list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from string import Formatter
from typing import Any

from weft_training.made import general, words
from weft_training.made.asking import asked, capital, table
from weft_training.made.exchange import Maker

Message = dict[str, Any]
Values = dict[str, Any]
WORDS = ("pools", "pairs", "trips", "skies", "rates")  # in the table, and no function
DIRECT, UNFIT, AGAIN, OTHER, THANKED, RULED = 0.11, 0.04, 0.2, 0.1, 0.12, 0.1
# What nobody needs a function for.
PLAIN: tuple[Maker, ...] = (general.capital_city, words.related, general.statement, general.lists, words.plural)
GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi! What can I do for you?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("How are you?", "I am fine, thank you! How can I help you?"),
    ("Who are you?", "I am a small language model that ships with Weft. I can call the functions that are listed."),
    ("Thank you!", "You are welcome!"),
)
RULES = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer in one short sentence.",
    "You help people at home.", "Be brief.", "You are an assistant. Use the functions when they help.",
)  # fmt: skip
# Listed beside the parameters that are needed, and never used.
SPARE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("verbose", {"type": "boolean"}),
    ("limit", {"type": "integer"}),
    ("comment", {"type": "string"}),
    ("format", {"type": "string", "enum": ["short", "long"]}),
)
COMPUTED: dict[str, Callable[[Values], Any]] = {
    "add": lambda drawn: drawn["a"] + drawn["b"],
    "multiply": lambda drawn: drawn["a"] * drawn["b"],
    "units": lambda drawn: round(drawn["length"] * 2.54, 2),
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function as one conversation lists it."""

    key: str  # its place in the table
    name: str
    description: str
    parameters: dict[str, str]  # a word of the table, and what the parameter is called here
    schema: dict[str, Any]
    gives: dict[str, str]  # a word of the table, and what it is called in the result

    def listed(self) -> dict[str, Any]:
        described = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": described}


@dataclass(frozen=True, slots=True)
class Asked:
    said: str
    arguments: Values
    result: Values
    answer: str


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The functions of the table, without its pools of words."""
    return {key: entry for key, entry in table("calls").items() if key not in WORDS}


@cache
def keys() -> tuple[str, ...]:
    return tuple(key for key, entry in entries().items() if "like" not in entry)


def function(random: Random, key: str) -> Function:
    """A function of the table under one of its names."""
    entry = entries()[key]
    parameters, properties = {}, {}
    described = random.random() < 0.6
    for word, each in entry["parameters"].items():
        name = random.choice([name for name in each["names"] if name not in properties])
        parameters[word] = name
        properties[name] = {"type": each["type"]}
        if "enum" in each:
            properties[name]["enum"] = each["enum"]
        if described:
            properties[name]["description"] = random.choice(each["descriptions"])
    required = list(properties)
    if random.random() < 0.08:
        name, kind = random.choice(SPARE)
        properties.setdefault(name, kind)
    gives = {word: random.choice(names) for word, names in entry["gives"].items()}
    schema = {"type": "object", "properties": properties, "required": required}
    return Function(
        key,
        spelled(random, random.choice(entry["names"])),
        random.choice(entry["descriptions"]),
        parameters,
        schema,
        gives,
    )


def spelled(random: Random, name: str) -> str:
    """A name as one of several habits writes it."""
    chance = random.random()
    if chance < 0.12:
        first, *rest = name.split("_")
        return first + "".join(map(str.capitalize, rest))
    if chance < 0.16:
        return random.choice(["home_", "my_", "api_", "do_", "tool_"]) + name
    return name


def drawn(random: Random, key: str) -> tuple[Values, Values]:
    """A value for every word, and how it is said."""
    values: Values = {"yes": True}
    spoken: Values = {}
    for word, pool in table("calls")["pools"].items():
        if isinstance(pool, list):
            values[word] = random.choice(pool)
        elif "words" in pool:
            spoken[word] = random.choice(list(pool["words"]))
            values[word] = pool["words"][spoken[word]]
        else:
            values[word] = random.randint(pool["low"], pool["high"])
    values["rolled"] = random.randint(1, values["dice"])
    values.update(paired(random))
    values.update(consistent(random, key, values))
    if key == "contact":
        values["email"] = f"{values['name'].lower()}@example.com"
    if key in COMPUTED:
        values["result"] = COMPUTED[key](values)
    told = {**values, **spoken}
    for word, sky in (("rain", "rainy"), ("snow", "snowy"), ("sun", "sunny")):
        told[word] = "Yes" if values["sky"] == sky else "No"
    return values, told


def consistent(random: Random, key: str, values: Values) -> Values:
    """What has to fit what was drawn before: no snow in the heat, ways between cities that can be gone."""
    skies, trips, rates = (table("calls")[name] for name in ("skies", "trips", "rates"))
    warm = values["city"] in skies["warm"]
    sky = random.choice(["sunny", "cloudy", "windy", "rainy"]) if warm else values["sky"]
    low, high = skies[sky]
    found: Values = {"sky": sky, "degrees": random.randint(max(low, 14) if warm else low, high)}
    if key in ("directions", "distance"):
        found["city"], found["city2"], found["kilometres"] = random.choice(trips["ways"])
        found["duration"] = round(60 * found["kilometres"] / trips["speeds"][values["mode"]])
    worth = values["amount"] * rates[values["currency"]] / rates[values["currency2"]]
    return {**found, "converted": max(1, round(worth))}


def paired(random: Random) -> Values:
    """Words of which one follows from the other."""
    values: Values = {}
    for word, pool in table("calls")["pairs"].items():
        values[word] = random.choice([each for each in pool if each != "to"])
        values[pool["to"]] = pool[values[word]]
    values["phrase"], found = random.choice(list(table("words")["translations"].items()))
    language, values["translated"] = random.choice(list(zip(general.LANGUAGES, found)))
    return {**values, "language": language}


def ask(random: Random, called: Function, again: bool = False) -> Asked:
    """Somebody asks for what a function does; `again` in the few words that do after an earlier question."""
    ways = [called.key, *(key for key, entry in entries().items() if entry.get("like") == called.key)]
    entry = entries()[called.key if again else random.choice(ways)]
    values, told = drawn(random, called.key)
    form = random.choice(entry["again" if again else "said"])
    said = form.format(**told)
    said = capital(said) if "{text}" in form or "{note}" in form else asked(random, capital(said))
    arguments = {name: values[word] for word, name in called.parameters.items()}
    result = {name: values[word] for word, name in called.gives.items()}
    return Asked(said, arguments, result, capital(random.choice(entry["answers"]).format(**told)))


def words_of(form: str) -> set[str]:
    """
    >>> sorted(words_of("From {city} to {city2}"))
    ['city', 'city2']
    """
    return {word for _, word, _, _ in Formatter().parse(form) if word}


def turns(called: Function, each: Asked) -> list[Message]:
    call = {"type": "function", "function": {"name": called.name, "arguments": json.dumps(each.arguments)}}
    return [
        {"role": "user", "content": each.said},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(each.result)},
        {"role": "assistant", "content": each.answer},
    ]


def exchange(said: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]


def conversation(random: Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools, as an API takes them."""
    chance = random.random()
    known = chosen(random, world=chance >= DIRECT)
    if chance < DIRECT:
        messages = direct(random)
    elif chance < DIRECT + UNFIT:
        messages = unfit(random, known)
    else:
        messages = served(random, known)
    if random.random() < RULED:
        messages.insert(0, {"role": "system", "content": random.choice(RULES)})
    return messages, [each.listed() for each in known]


def chosen(random: Random, world: bool) -> list[Function]:
    """One to four functions of different names; without those that know everything, unless `world`."""
    open_keys = [key for key in keys() if world or not entries()[key].get("world")]
    known: list[Function] = []
    for key in random.sample(open_keys, random.choice([1, 1, 2, 2, 3, 4])):
        made = function(random, key)
        kin = entries()[key]["kin"]
        apart = kin == "weather" or all(entries()[each.key]["kin"] != kin for each in known)
        if apart and all(each.name != made.name for each in known):
            known.append(made)
    return known


def served(random: Random, known: list[Function]) -> list[Message]:
    """A question that one of the functions answers; perhaps another, perhaps thanks."""
    called = random.choice(known)
    messages = turns(called, ask(random, called))
    chance = random.random()
    if chance < AGAIN and "again" in entries()[called.key]:
        messages += turns(called, ask(random, called, again=True))
    elif chance > 1 - OTHER:
        other = random.choice(known)
        messages += turns(other, ask(random, other))
    if random.random() < THANKED:
        thanks = random.choice(["Thanks!", "Thank you!", "Great, thank you.", "Perfect, thanks."])
        messages += exchange(thanks, random.choice(["You are welcome!", "You're welcome!", "Happy to help!"]))
    return messages


def direct(random: Random) -> list[Message]:
    """A question that needs no function."""
    if random.random() < 0.3:
        return exchange(*random.choice(GREETINGS))
    return [message for each in random.choice(PLAIN)(random) for message in exchange(*each)]


def unfit(random: Random, known: list[Function]) -> list[Message]:
    """A question that none of the functions answers."""
    kin = {entries()[each.key]["kin"] for each in known}
    strange = random.choice(
        [key for key in keys() if entries()[key]["kin"] not in kin and not entries()[key].get("world")]
    )
    said = ask(random, function(random, strange)).said
    return exchange(
        said,
        random.choice(
            ["I am sorry, I have no function for that.", "I cannot do that with the functions that I have, sorry.",
             "None of my functions can do that, sorry."]
        ),
    )  # fmt: skip


FUNCTIONS = tuple(function(Random(0), key) for key in keys())
