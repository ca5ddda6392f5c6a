"""Dialogues about everyday things: well formed, the same for the same seed, many, true where one can count."""

from __future__ import annotations

import re
from random import Random

import pytest

from weft_training.made import everyday, everyday_classes, everyday_things
from weft_training.made.everyday_words import NUMBERS, table
from weft_training.made.exchange import Exchange, Maker

MAKERS = list(everyday.MAKERS)
SHAPE = re.compile(r"[.!?]$|\n\d+\. [A-Z][a-zA-Z -]+$")


def drawn(count: int, seed: int = 0) -> list[list[Exchange]]:
    random = Random(seed)
    makers = random.choices(MAKERS, list(everyday.MAKERS.values()), k=count)
    return [maker(random) for maker in makers]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_every_exchange_is_well_formed(maker: Maker) -> None:
    for seed in range(300):
        exchanges = maker(Random(seed))
        assert exchanges == maker(Random(seed))
        for said, answer in exchanges:
            for text in (said, answer):
                assert text.isascii()
                assert text.strip() == text != ""
                assert not re.search(r"[{}]|  |\.\.|\ba [aeio]|\bI would like you to i\b", text), text
            assert SHAPE.search(answer), answer
            assert answer[0].isupper() or answer[0].isdigit(), answer


def test_conversations_are_many_and_short() -> None:
    found = drawn(2000)
    assert len({tuple(exchanges) for exchanges in found}) > 1850
    answers = [answer for exchanges in found for _, answer in exchanges]
    assert max(map(len, answers)) < 520
    assert sum(map(len, answers)) / len(answers) < 150


def test_the_tables_are_large_and_regular() -> None:
    things = everyday_things.things()
    whys, topics, howto = table("whys"), table("topics")["topic"], table("howto")["howto"]
    assert len(things) >= 320
    assert len(whys["why"]) + len(whys["asked"]) >= 180
    assert len(topics) >= 60
    assert len(howto) >= 110
    assert len({thing.named for thing in things}) == len(things)
    for thing in things:
        assert thing.group in everyday_things.GROUPS
        assert len(thing.facts) >= 3
        assert bool(thing.use) != bool(thing.good), thing.name
        assert all(re.match(r"[A-Z].*\.$", fact) for fact in thing.facts), thing.name
        assert not any(part.endswith(".") for part in (thing.kind, thing.looks, thing.where, thing.use, thing.good))
    for entry in howto:
        assert 4 <= len(entry["steps"]) <= 6
        assert entry["level"] in ("easy", "practice", "hard")


def test_as_many_tips_as_were_asked_for() -> None:
    for seed in range(300):
        random = Random(seed)
        entry = random.choice(table("howto")["howto"])
        said, answer = everyday.tips(random, entry)
        number = next(word for word in re.findall(r"\w+", said.lower()) if word in NUMBERS or word.isdigit())
        count = int(number) if number.isdigit() else NUMBERS.index(number)
        assert sum(step in answer for step in entry["steps"]) == count


def test_as_many_kinds_as_were_asked_for() -> None:
    for seed in range(300):
        said, answer = everyday_things.kinds(Random(seed))[0]
        number = next(word for word in re.findall(r"\w+", said.lower()) if word in NUMBERS or word.isdigit())
        count = int(number) if number.isdigit() else NUMBERS.index(number)
        items = answer.splitlines() if "\n" in answer else re.split(r", | and ", answer)
        assert len(items) == count, answer


def test_comparisons_agree_with_the_values() -> None:
    measures = table("measures")["measure"]
    for seed in range(300):
        _, answer = everyday_things.measured(Random(seed))
        match = re.search(r"^(?:Yes, )?(?:an? |the )?(.+) is (\w+) than (?:an? |the )?(.+)\.$", answer, re.I)
        if not match or answer.startswith("No"):
            continue
        one, word, other = match.groups()
        fits = []
        for measure in measures:
            values = {name.lower().removeprefix("a "): value for name, value in measure["values"].items()}
            if word in (measure["more"], measure["less"]) and {one.lower(), other.lower()} <= set(values):
                fits.append((values[one.lower()] > values[other.lower()]) == (word == measure["more"]))
        assert fits
        assert all(fits), answer


def test_a_follow_up_is_about_the_same_thing() -> None:
    thing = next(each for each in everyday_things.things() if each.name == "bee")
    answers = {everyday_things.after(Random(seed), thing, thing.defined)[1] for seed in range(200)}
    assert any("honey" in answer for answer in answers)
    assert any("pollen" in answer for answer in answers)
    assert all("It" in answer or "bee" in answer.lower() or answer.startswith("Because it") for answer in answers)


def test_what_belongs_where() -> None:
    entries = {entry["name"]: entry for entry in table("classes")["class"]}
    said = dict(everyday_classes.belongs(Random(seed)) for seed in range(3000))
    for question, answer in said.items():
        for name, entry in entries.items():
            found = re.search(rf"\bi(?:s|re) (.+) an? {name}\??$", question, re.I)
            groups = [thing.group for thing in everyday_things.things() if found and thing.named == found[1]]
            if groups and groups[0] in entry["groups"]:
                assert answer.startswith("Yes"), (question, answer)
    assert any(answer.startswith("No") for answer in said.values())
    spider = [answer for question, answer in said.items() if "a spider an insect" in question]
    assert all(answer.startswith("No") for answer in spider)
