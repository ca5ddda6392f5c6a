"""Conversations strung together: names are kept, nothing contradicts what was told, farewells come last."""

from __future__ import annotations

import re
from random import Random

import pytest

from weft_training import made
from weft_training.made import basics
from weft_training.made.base import HEADS
from weft_training.made.wording import table

DRAWN = 4000


@pytest.fixture(scope="module")
def conversations():
    return [made.conversation(Random(seed)) for seed in range(DRAWN)]


def test_conversations_are_not_empty_and_end_with_the_farewell(conversations):
    parted = 0
    for exchanges in conversations:
        assert exchanges
        *others, last = exchanges
        assert not any(made.is_farewell([each]) for each in others), exchanges
        parted += made.is_farewell([last])
    assert parted > DRAWN / 50


def test_who_told_his_name_is_called_by_it(conversations):
    asked = 0
    for exchanges in conversations:
        names = [name for said, _ in exchanges for name in made.NAME.findall(said)]
        assert len(set(names)) <= 1, exchanges
        known = None
        for said, answer in exchanges:
            known = known or next(iter(made.NAME.findall(said)), None)
            if known and made.NAME_ASKED.search(said):
                assert known in answer, exchanges
                asked += 1
    assert asked > DRAWN / 50


def test_what_was_told_is_not_contradicted(monkeypatch):
    monkeypatch.setattr(made, "TOLD", 1)
    for seed in range(DRAWN // 2):
        exchanges = made.conversation(Random(seed))
        asked = [
            at
            for at, (said, _) in enumerate(exchanges)
            if re.match(r"(What is|Where do|Do you remember)\b.* (my|I)\b", said)
        ]
        assert asked, exchanges
        told = next(at for at, (said, _) in enumerate(exchanges) if made.is_personal([(said, "")]))
        assert not made.is_personal(exchanges[told + 1 : asked[-1]]), exchanges
        assert not any(made.NAME.search(said) for said, _ in exchanges[:told])


def test_a_piece_is_dropped_as_a_whole(monkeypatch):
    monkeypatch.setattr(made, "TOLD", 1)
    monkeypatch.setattr(made, "GREETED", 0)
    monkeypatch.setattr(made, "PARTED", 0)
    monkeypatch.setattr(made, "MAKERS", {lambda random: [("I have a cat.", "Nice!"), ("And another?", "Yes.")]: 1})
    assert all(len(made.conversation(Random(seed))) == 2 for seed in range(50))


@pytest.mark.parametrize(
    "said", ["Tell me a story.", "I want to know why.", "I have a question: why?", "Explain it to me."]
)
def test_who_only_asks_does_not_speak_of_himself(said):
    assert not made.is_personal([(said, "Gladly!")])


def test_pets_are_ordinary():
    for seed in range(300):
        (said, _), _ = basics.told_and_asked(Random(seed))
        found = re.match(r"I have an? (.+) called", said)
        assert found is None or found[1] in table("talk")["slots"]["pet"]


def test_things_have_a_head():
    assert (HEADS["a key"], HEADS["a mirror"]) == ("tool", "glass")
