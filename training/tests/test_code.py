"""The Python that is taught runs, and does what is said of it."""

from __future__ import annotations

import builtins
import json
import re
from datetime import datetime
from random import Random

import pytest

from tests.test_numbers import well_formed
from weft_training.made import code, families
from weft_training.made.asking import table


def test_there_are_enough_functions_and_all_run():
    assert len(code.functions()) >= 220
    assert len(families.FAMILIES) >= 15
    for function in code.functions():
        assert len(function.does) >= 2
        assert function.calls
        for call in function.calls:
            code.result(function.code(), f"{function.name}({call})")
            code.result(function.code(docstring=True), f"{function.name}({call})")


def test_what_functions_do_is_said_once():
    said = [does for function in code.functions() for does in function.does]
    assert len(said) == len(set(said))


def test_functions_of_a_family_run():
    names = set()
    for seed in range(1500):
        function = families.drawn(Random(seed))
        names.add((function.name, function.body))
        for call in function.calls:
            code.result(function.code(), f"{function.name}({call})")
    assert len(names) > 500


@pytest.mark.parametrize(
    ("family", "does", "call", "result"),
    [
        (families.every, "every third item of a list", "[1, 2, 3, 4]", "[1, 4]"),
        (families.ends, "the last 3 items", "[1, 2, 3, 4]", "[2, 3, 4]"),
        (families.compared, "keeps the numbers of a list that are greater than 5", "[5, 6]", "[6]"),
        (families.constant, "adds 3 to every number", "[1, 2]", "[4, 5]"),
        (families.longer, "keeps the words longer than", "['a']", "[]"),
    ],
)
def test_the_constant_of_the_request_is_that_of_the_code(family, does, call, result):
    found = (family(Random(seed)) for seed in range(5000))
    function = next(each for each in found if any(does in text for text in each.does) and "begin" not in each.does[0])
    assert code.result(function.code(), f"{function.name}({call})") == result


def test_answers_hold_code_that_runs_and_results_that_are_right():
    for seed in range(600):
        for maker in (code.function, code.family):
            exchanges = maker(Random(seed))
            names: dict = {}
            for said, answer in exchanges:
                well_formed(said, answer)
                for block in re.findall(r"```python\n(.*?)\n```", answer, re.S):
                    exec(block.replace("print(", "str("), names)
                for call, result in re.findall(r"(\w+\(.*?\)) returns (.*)\.$", answer, re.M):
                    assert repr(eval(call, names)) == result, answer


def test_classes_snippets_and_words_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "input", lambda asked="": "Anna")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    for entry in table("python")["class"]:
        code.result(entry["code"], entry["shown"])
    pieces = [entry["code"] for entry in table("python")["snippet"]]
    pieces += [shown for _, shown in table("python")["words"].values()]
    for piece in pieces:
        exec(piece, {"__name__": "piece", "datetime": datetime})
    assert len(table("python")["words"]) >= 40
    assert len(table("python")["snippet"]) >= 40


@pytest.mark.parametrize("maker", list(code.MAKERS), ids=lambda maker: maker.__name__)
def test_what_a_maker_says_is_well_formed_and_drawn_from_the_seed(maker):
    for seed in range(200):
        assert maker(Random(seed)) == maker(Random(seed))
        for said, answer in maker(Random(seed)):
            well_formed(said, answer)


def test_draws_differ():
    random = Random(2)
    makers = random.choices(list(code.MAKERS), list(code.MAKERS.values()), k=2000)
    assert len({json.dumps(maker(random)) for maker in makers}) > 1850


def test_a_renamed_function_keeps_its_new_name():
    renamed = 0
    for seed in range(6000):
        exchanges = code.function(Random(seed))
        for at, (said, answer) in enumerate(exchanges):
            found = re.search(r"(?:ename it to|all it) (\w+)", said)
            for _, later in exchanges[at + 1 :] if found else ():
                old = re.search(r"def (\w+)", exchanges[0][1])[1]
                assert not re.search(rf"\b{old}\(", later) or re.search(rf"\b{old}\b", answer.partition("(")[2]), later
                assert f"called {old}." not in later
                renamed += found[1] in later
    assert renamed > 10


def test_a_renamed_function_calls_itself_by_its_new_name():
    [function] = [each for each in code.functions() if each.name == "factorial_recursive"]
    assert code.result(function.named("run").code(), "run(4)") == "24"
