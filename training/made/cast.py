"""Heroes and helpers of stories: how they are introduced, called afterwards, and asked for."""

from __future__ import annotations

from random import Random
from typing import Any

from training.made.wording import table

PRONOUNS = {
    "he": ("he", "him", "his", "himself"),
    "she": ("she", "her", "her", "herself"),
    "it": ("it", "it", "its", "itself"),
}
NATURES = {
    "child": ["little", "young", "cheerful", "curious", "clever", "kind", "friendly", ""],
    "role": ["young", "kind", "old", "friendly", "cheerful", "clever", "poor", ""],
    "animal": ["little", "small", "young", "curious", "clever", "friendly", "kind", "grey", ""],
    "sea": ["little", "young", "curious", "friendly", "happy", ""],
    "thing": ["little", "small", "old", "blue", "red", ""],
    "sky": ["little", "small", "young", "lonely", ""],
}
HELPERS = ["kind", "clever", "friendly", "gentle", "wise", "cheerful", "quiet"]


def pronouns(which: str) -> dict[str, str]:
    """
    >>> pronouns("she")["his"]
    'her'
    """
    return dict(zip(("he", "him", "his", "himself"), PRONOUNS[which]))


def person(random: Random) -> tuple[str, str, str]:
    """A name, the pronoun and what such a child is called."""
    which, word, names = random.choice([("she", "girl", "girls"), ("he", "boy", "boys")])
    return random.choice(table("cast")[names]), which, word


def hero(random: Random, kind: str) -> dict[str, str]:
    """The slots of a hero; `topic` is how somebody asks for a story about it, `hero_word` what it is."""
    cast, nature = table("cast"), random.choice(NATURES[kind])
    place = _place(random, kind)
    if kind == "child":
        name, which, word = person(random)
        introduced, topics = f"{nature} {word} called {name}", [name, f"a {word} called {name}", f"a {word}"]
        return _slots(introduced, name, topics, word, which) | {"place": place}
    if kind == "thing":
        thing: dict[str, Any] = random.choice(cast["things"])
        word, which, place = thing["name"], "it", random.choice(thing["place"])
    elif kind == "role":
        word, which = random.choice(
            [(word, which) for group, which in (("men", "he"), ("women", "she")) for word in cast[group]]
            + [(word, random.choice(["he", "she"]) if word != "postman" else "he") for word in cast["roles"]]
        )
    else:
        word, which = random.choice(cast[{"animal": "animals", "sea": "sea", "sky": "sky"}[kind]]), "it"
    topics = [f"a {word}", f"a {nature} {word}"]
    if kind in ("role", "animal", "sea") and random.random() < 0.4:
        if kind == "role":
            name = random.choice(cast["boys" if which == "he" else "girls"])
        else:
            name, which = random.choice(cast["pets"]), random.choice(["he", "she"])
        return _slots(f"{nature} {word} called {name}", name, [*topics, f"a {word} called {name}"], word, which) | {
            "place": place
        }
    return _slots(f"{nature} {word}", f"the {word}", topics, word, which) | {"place": place}


def _place(random: Random, kind: str) -> str:
    cast = table("cast")
    places: list[str] = {"sea": cast["deep"], "sky": cast["high"], "child": cast["land"] + cast["town"]}.get(
        kind, cast["land"]
    )
    return random.choice(places)


def _slots(introduced: str, name: str, topics: list[str], word: str, which: str) -> dict[str, str]:
    return {
        "a_hero": " ".join(f"a {introduced}".split()),
        "hero": name,
        "Hero": name[0].upper() + name[1:],
        "hero_word": word,
        "topics": "|".join(" ".join(topic.split()) for topic in topics),
    } | pronouns(which)


def helper(random: Random, kind: str, hero: dict[str, str]) -> dict[str, str]:
    """The slots of a helper that is not the hero's own kind; `helper_topic` is empty for relatives."""
    cast, nature = table("cast"), random.choice(HELPERS)
    sort = {
        "child": ["friend", "friend", "relative", "old"],
        "role": ["visitor", "visitor", "animal", "old"],
        "animal": ["animal"],
        "sea": ["sea"],
        "thing": ["visitor", "visitor", "animal", "old"],
        "sky": ["visitor", "animal"],
    }[kind]
    chosen = random.choice(sort)
    if chosen in ("friend", "visitor"):
        name, _, word = person(random)
        while name == hero["hero"]:
            name, _, word = person(random)
        first = f"{hero['his']} friend {name}" if chosen == "friend" else f"a {word} called {name}"
        return {"helper": first, "the_helper": name, "helper_topic": name}
    if chosen == "relative":
        who = random.choice(["grandmother", "grandfather", "sister", "brother", "uncle", "aunt", "teacher"])
        return {"helper": f"{hero['his']} {who}", "the_helper": f"{hero['his']} {who}", "helper_topic": ""}
    if chosen == "old":
        word = random.choice(["old woman", "old man", "old neighbour"])
        return {"helper": f"an {word}", "the_helper": f"the {word}", "helper_topic": f"an {word}"}
    word = random.choice([each for each in cast["sea" if chosen == "sea" else "animals"] if each != hero["hero_word"]])
    return {"helper": f"a {nature} {word}", "the_helper": f"the {word}", "helper_topic": f"a {word}"}
