"""Small talk, feelings, stories, continuations and poems made by rule: well formed, repeatable, various, coherent."""

from __future__ import annotations

import re
from random import Random

import pytest

from weft_training.made import advice, cast, continuations, feelings, poems, stories, talk
from weft_training.made.exchange import Exchange, Maker
from weft_training.made.wording import table

MAKERS: dict[Maker, float] = {**talk.MAKERS, **stories.MAKERS}
SPOILT = re.compile(r"[{}\[\]|]|  |\b[Aa] [aeio]|\b[Aa]n [bcdfgjklmnpqrstvwxyz]| [.,!?]|\.\.|[.!?]\. | i ")


def drawn(makers: dict[Maker, float], count: int) -> list[list[Exchange]]:
    random = Random(1)
    return [maker(random) for maker in random.choices(list(makers), list(makers.values()), k=count)]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_every_maker_speaks_well(maker: Maker) -> None:
    for seed in range(250):
        exchanges = maker(Random(seed))
        assert exchanges == maker(Random(seed))
        for said, answer in exchanges:
            assert said.isascii()
            assert answer.isascii()
            assert said.strip() == said
            assert answer.strip() == answer
            assert said
            assert answer[-1] in '.!?"' or "\nDear " in f"\n{answer}", answer
            assert not SPOILT.search(said), said
            assert not SPOILT.search(answer), answer
            assert answer[0].isupper() or answer[0] == '"', answer


@pytest.mark.parametrize(("makers", "least"), [(talk.MAKERS, 1750), (stories.MAKERS, 1850), (feelings.MAKERS, 1400)])
def test_draws_differ(makers: dict[Maker, float], least: int) -> None:
    assert len({tuple(exchanges) for exchanges in drawn(makers, 2000)}) > least


def test_weights() -> None:
    assert sum(talk.MAKERS.values()) == pytest.approx(10, abs=1)
    assert sum(stories.MAKERS.values()) == pytest.approx(10, abs=1)


@pytest.mark.parametrize("plot", table("stories")["plot"], ids=lambda plot: plot["about"])
def test_every_plot_can_be_told(plot: dict[str, object]) -> None:
    kinds = plot["kinds"]
    assert isinstance(kinds, list)
    assert set(kinds) <= set(stories.KINDS)
    assert "{helper}" in str(plot["problem"]) + str(plot["second"]), "the helper is introduced before the end"
    for part in (*stories.PARTS, "then"):
        assert str(plot[part]).rstrip("]")[-1] in '.?"|!', part


def test_a_story_is_about_what_was_asked_for() -> None:
    random = Random(2)
    for _ in range(500):
        told = stories.tale(random)
        text, slots = told.told().lower(), told.slots
        for topic in slots["topics"].split("|"):
            assert set(re.findall(r"\w+", topic.lower())) - {"a", "an"} <= set(re.findall(r"\w+", text)), (topic, text)
        assert slots["the_helper"].lower().split()[-1] in text
        assert slots["place"] in text
        answers = dict(stories.questions(random, told)).values()
        assert told.parts["end"] in answers


def test_a_continuation_keeps_the_hero_and_the_thing() -> None:
    random, names = Random(3), {*table("cast")["girls"], *table("cast")["boys"]}
    for _ in range(500):
        said, answer = continuations.continuation(random)
        mentioned = [name for name in re.findall(r"[A-Z]\w+", said) if name in names]
        assert all(re.search(rf"\b{name}\b", answer) for name in mentioned), (said, answer)
        scene = re.search(r"there (?:once )?was a \w+ (\w+) (?:in|on|at|by|under|over|between)\b", said)
        assert scene is None or scene[1] in answer, (said, answer)


def test_poems_have_four_lines_on_their_topic() -> None:
    assert len(table("poems")["poem"]) >= 45
    for entry in table("poems")["poem"]:
        assert len(entry["couplets"]) >= 4
        assert all(couplet.count(" / ") == 1 for couplet in entry["couplets"])
    for seed in range(200):
        said, answer = poems.poem(Random(seed))[0]
        verses = answer.split("\n\n")[-1].split("\n")
        assert len(verses) == 4
        assert all(verse[0].isupper() or verse[0] == '"' for verse in verses)
        topic = [entry["topic"] for entry in table("poems")["poem"] if f"about {entry['topic']}" in said]
        assert topic or "about" not in said


def test_who_helped_is_who_helps_in_the_plot() -> None:
    random, seen = Random(4), set()
    for _ in range(1500):
        told = stories.tale(random)
        helps, (hero, helper) = told.plot.get("helps"), (told.slots[name] for name in ("Hero", "the_helper"))
        seen.add(helps)
        said = {question.lower(): answer for question, answer in stories.questions(random, told)}
        answers = [
            answer
            for question, answer in said.items()
            if re.match("whom did .+ help|who (helped|was (the )?help|came to help)", question)
        ]
        assert bool(answers) == (helps != "nobody")
        if helps == "hero":
            assert all(f"helped {helper}" in answer for answer in answers), answers
        assert told.sentence().startswith(hero)
        assert (f"{helper} helped." in told.sentence()) == (helps is None)
    assert seen == {None, "hero", "nobody"}


def test_a_short_story_keeps_what_its_end_needs() -> None:
    random = Random(5)
    for _ in range(500):
        told = stories.tale(random)
        assert (told.parts["first"] in told.short()) == bool(told.plot.get("whole"))
        assert told.slots["hero_word"] not in told.plot.get("unless", ())


def test_advice_is_about_what_was_asked() -> None:
    assert all(len(table("advice")[name]) >= 20 for name in ("pet", "note", "meal"))
    for seed in range(300):
        said, answer = advice.note(Random(seed))[-1]
        entry = next((each for each in table("advice")["note"] if each["body"] in answer), None)
        assert entry is not None or "Dear" not in answer
        [(said, answer), *others] = advice.meal(Random(seed))
        entry = next(each for each in table("advice")["meal"] if re.search(rf"for {each['name']}\b(?! day)", said))
        dishes = dict(entry["dishes"])
        assert any(dish in answer.lower() for dish in dishes), answer
        for _, later in others:
            assert not later.startswith("Because") or later[len("Because ") : -1] in dishes.values()


def test_tables_are_as_broad_as_promised() -> None:
    assert len(table("stories")["plot"]) >= 60
    assert len(table("feelings")["feeling"]) >= 25
    assert len(table("jokes")["joke"]) + len(table("jokes")["riddle"]) >= 60
    assert len(table("talk")["talk"]) >= 100


def test_heroes_and_helpers_differ() -> None:
    for seed in range(300):
        random = Random(seed)
        for kind in stories.KINDS:
            hero = cast.hero(random, kind)
            assert cast.helper(random, kind, hero)["the_helper"] not in (hero["hero"], f"the {hero['hero_word']}")
