"""Heroes and helpers of stories: how they are introduced, called afterwards, and asked for."""

from __future__ import annotations

from random import Random

from weft_training.made.wording import table

PRONOUNS = {
    "he": ("he", "him", "his", "himself"),
    "she": ("she", "her", "her", "herself"),
    "it": ("it", "it", "its", "itself"),
}
NATURES = {
    "child": ["little", "young", "cheerful", "curious", "clever", "kind", "friendly", ""],
    "role": ["young", "kind", "old", "friendly", "cheerful", "clever", ""],
    "animal": ["little", "small", "young", "curious", "clever", "friendly", "kind", "grey", ""],
    "sea": ["little", "young", "curious", "friendly", "happy", ""],
    "thing": ["little", "small", "old", "blue", "red", ""],
    "sky": ["little", "small", "young", "lonely", ""],
}
COMPANY = {
    "child": ["friend", "friend", "relative", "old"],
    "role": ["visitor", "visitor", "animals", "old"],
    "animal": ["animals"],
    "sea": ["sea"],
    "thing": ["visitor", "visitor", "animals", "old"],
    "sky": ["visitor", "animals"],
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
    """The slots of a hero; `topics` is how somebody asks for a story about it, `hero_word` what it is."""
    nature, place = random.choice(NATURES[kind]), _place(random, kind)
    if kind == "child":
        name, which, word = person(random)
        topics = [name, f"a {word} called {name}", f"a {word}"]
        return _slots(f"{nature} {word} called {name}", name, topics, word, which, place)
    word, which = _sort(random, kind)
    if kind == "thing":
        place = random.choice(next(each["place"] for each in table("cast")["things"] if each["name"] == word))
    topics = [f"a {word}", f"a {nature} {word}"]
    if kind not in ("role", "animal", "sea") or random.random() < 0.6:
        return _slots(f"{nature} {word}", f"the {word}", topics, word, which, place)
    if kind == "role":
        name = random.choice(table("cast")["boys" if which == "he" else "girls"])
    else:
        name, which = random.choice(table("cast")["pets"]), random.choice(["he", "she"])
    return _slots(f"{nature} {word} called {name}", name, [*topics, f"a {word} called {name}"], word, which, place)


def _sort(random: Random, kind: str) -> tuple[str, str]:
    """What the hero is, and its pronoun."""
    cast = table("cast")
    if kind == "role":
        group, which = random.choice([("men", "he"), ("women", "she"), ("roles", "he"), ("roles", "she")])
        return random.choice(cast[group]), which
    if kind == "thing":
        return random.choice(cast["things"])["name"], "it"
    return random.choice(cast["animals" if kind == "animal" else kind]), "it"


def _place(random: Random, kind: str) -> str:
    cast = table("cast")
    places = {"sea": cast["deep"], "sky": cast["high"], "child": cast["land"] + cast["town"]}.get(kind, cast["land"])
    return str(random.choice(places))


def _slots(introduced: str, name: str, topics: list[str], word: str, which: str, place: str) -> dict[str, str]:
    return {
        "a_hero": " ".join(f"a {introduced}".split()),
        "hero": name,
        "Hero": name[0].upper() + name[1:],
        "hero_word": word,
        "topics": "|".join(" ".join(topic.split()) for topic in topics),
        "place": place,
    } | pronouns(which)


def helper(random: Random, kind: str, hero: dict[str, str]) -> dict[str, str]:
    """The slots of a helper that is not the hero's own kind; `helper_topic` is empty for relatives."""
    sort, his = random.choice(COMPANY[kind]), hero["his"]
    if sort in ("friend", "visitor"):
        name, _, word = next(each for each in iter(lambda: person(random), None) if each[0] != hero["hero"])
        return _helper(f"{his} friend {name}" if sort == "friend" else f"a {word} called {name}", name, name)
    if sort == "relative":
        who = random.choice(["grandmother", "grandfather", "sister", "brother", "uncle", "aunt", "teacher"])
        return _helper(f"{his} {who}", f"{his} {who}", "")
    if sort == "old":
        word = random.choice(["old woman", "old man", "old neighbour"])
        return _helper(f"an {word}", f"the {word}", f"an {word}")
    word = random.choice([each for each in table("cast")[sort] if each != hero["hero_word"]])
    return _helper(f"a {random.choice(HELPERS)} {word}", f"the {word}", f"a {word}")


def _helper(first: str, later: str, topic: str) -> dict[str, str]:
    return {"helper": first, "the_helper": later, "helper_topic": topic}
