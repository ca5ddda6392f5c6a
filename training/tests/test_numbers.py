"""Dialogues on numbers and words, and those under a system message: well formed, exact, varied, the same every time."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random

import pytest

from weft_training.made import instructions, numbers, words
from weft_training.made.asking import in_words, table
from weft_training.template import SPECIALS

MAKERS = {f"{module.__name__}.{maker.__name__}": maker for module in (numbers, words) for maker in module.MAKERS}
SIGNS = {"plus": "+", "minus": "-", "times": "*", "divided by": "//", "x": "*", "/": "//", "+": "+", "-": "-", "*": "*"}


def well_formed(said, answer):
    for text in (said, answer):
        assert text.isascii(), text
        assert text == text.strip() != "", text
        assert "```" in text or not re.search(r"\{[a-z_]+\d?\}", text), text
        assert "  " not in text or "```" in text, text
        assert not any(special in text for special in SPECIALS)
    assert answer[-1] in '.!?"}*)`' or re.search(r"^\d\. \w", answer), answer


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_maker_says_is_well_formed_and_drawn_from_the_seed(name):
    for seed in range(200):
        exchanges = MAKERS[name](Random(seed))
        assert exchanges == MAKERS[name](Random(seed))
        for said, answer in exchanges:
            well_formed(said, answer)


@pytest.mark.parametrize(("module", "least"), [(numbers, 1850), (words, 1750)], ids=["numbers", "words"])
def test_draws_differ(module, least):
    random = Random(1)
    makers = random.choices(list(module.MAKERS), list(module.MAKERS.values()), k=2000)
    assert len({json.dumps(maker(random)) for maker in makers}) > least


def test_sums_are_right():
    for seed in range(500):
        for _, answer in numbers.sums(Random(seed)):
            a, sign, b, result = re.match(r"(-?\d+) (\D+?) (-?\d+) (?:is|=|equals) (-?\d+)\.$", answer).groups()
            assert int(result) == eval(f"{a} {SIGNS[sign]} {b}"), answer


def test_a_sum_is_gone_on_with_from_its_result():
    for seed in range(300):
        for (_, before), (said, answer) in pairwise(numbers.sums(Random(seed))):
            if not re.search(r"\d+ ?\D+ ?\d+", said):
                assert answer.split()[0] == re.search(r"(-?\d+)\.$", before)[1], (before, said, answer)


def test_counting_ends_where_it_was_asked_to():
    for seed in range(500):
        said, answer = numbers.counting(Random(seed))[0]
        ends = [int(n) for n in re.findall(r"\d+", said)][:2]
        counted = [each.strip(" .").lower() for each in answer.split(",")]
        wanted = [str(n) for n in ends] if counted[0].isdigit() else [in_words(n) for n in ends]
        assert counted[-1] == wanted[-1 if len(wanted) == 1 else 1], (said, answer)
        assert counted[0] == (wanted[0] if len(wanted) > 1 else "1"), (said, answer)
        if counted[0].isdigit():
            assert len({int(b) - int(a) for a, b in pairwise(counted)}) == 1


def test_problems_give_what_their_sum_gives():
    for seed in range(300):
        text, way, result, full = Random(seed).choice(
            [numbers.more, numbers.less, numbers.groups, numbers.shared, numbers.together]
        )(Random(seed))
        assert eval(way) == result
        assert str(result) in full
        assert all(number in text for number in re.findall(r"\d+", way))


def test_sorted_numbers_are_sorted():
    for seed in range(300):
        said, answer = numbers.sorting(Random(seed))
        given = sorted(map(int, re.findall(r"\d+", said)))
        found = list(map(int, re.findall(r"\d+", answer)))
        if len(found) == 1:
            assert found[0] in (given[0], given[-1])
        else:
            assert found in (given, given[::-1])


def test_number_words_are_read_back():
    assert [in_words(n) for n in (7, 21, 40, 300, 999)] == [
        "seven", "twenty-one", "forty", "three hundred", "nine hundred and ninety-nine",
    ]  # fmt: skip
    assert len({in_words(n) for n in range(1000)}) == 1000


def test_words_are_enough():
    rows = table("words")
    least = {"past": 80, "opposite": 100, "synonym": 100, "translations": 60, "groups": 20, "capitals": 80}
    assert {name: len(rows[name]) >= count for name, count in least.items()} == dict.fromkeys(least, True)
    assert all(len(found) == 3 for found in rows["translations"].values())


def test_every_kind_of_system_message_is_obeyed_in_form():
    for kind in instructions.KINDS:
        for seed in range(100):
            system, exchanges = kind(Random(seed))
            assert (system, exchanges) == kind(Random(seed))
            assert system
            assert system.isascii()
            assert "{" not in system
            for said, answer in exchanges:
                well_formed(said, answer)


def test_manners_are_kept():
    for seed in range(800):
        system, exchanges = instructions.manner(Random(seed))
        for _, answer in exchanges:
            if "capital" in system or "uppercase" in system:
                assert answer == answer.upper()
            if "JSON" in system:
                assert json.loads(answer).keys() == {"answer"}
            if "ne word" in system or "single word" in system:
                assert len(answer.split()) == 1, answer
            if "exclamation" in system:
                assert answer.endswith("!!!")


def test_facts_of_a_system_message_are_those_of_the_answer():
    for seed in range(800):
        system, exchanges = instructions.scene(Random(seed))
        for said, answer in exchanges:
            for number in re.findall(r"\d+", answer):
                assert number in system, (system, said, answer)


def test_system_messages_are_many():
    systems = {instructions.conversation(Random(seed))[0] for seed in range(3000)}
    drawn = {json.dumps(instructions.conversation(Random(seed))) for seed in range(2000)}
    roles = table("instructions")["roles"]
    assert len(instructions.KINDS) + len(instructions.MANNERS) + len(roles) > 70
    assert len(systems) > 900
    assert len(drawn) > 1850
