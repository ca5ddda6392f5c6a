"""`weft doctor`: tells what would be used and why, and sees when a cache hit the cache is wrong."""

from __future__ import annotations

import pytest

from tests.support.models import tiny_model
from weft.cli.main import main
from weft.cli.selftest import Comparison, SelfTest, can_tell, complaints
from weft.offline.llm import LLM

SMALL = [*tiny_model.ARGUMENTS, "--memory", "32MiB", "--threads", "1", "--max-length", "1024"]


def test_doctor_finds_nothing_wrong_with_the_tiny_model(capsys):
    assert main(["doctor", *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.endswith("no problems found\n")
    for word in ("torch:", "cores:", "free memory:", "max_length:", "prefill-hit:", "decode-hit:", "wrong state:"):
        assert word in text
    assert "float32, from the checkpoint" in text
    assert "32MiB, as given" in text
    assert "would not show" not in text


def test_decisions_come_with_reasons(capsys):
    assert main(["doctor", *tiny_model.ARGUMENTS, "--memory", "32MiB", "--no-self-test"]) == 0
    text = capsys.readouterr().out
    assert "32768 tokens: the default limit; pass --max-length for more than 32768" in text
    assert "self-test" not in text


def test_without_a_cache_there_is_nothing_to_test(capsys):
    assert main(["doctor", *SMALL, "--no-cache"]) == 0
    assert "skipped: the cache is off" in capsys.readouterr().out


def test_a_model_that_cannot_be_loaded_is_wrong(capsys):
    assert main(["doctor", "/no/such/model"]) == 1
    assert "problem: there is no folder /no/such/model" in capsys.readouterr().out


@pytest.fixture
def llm():
    with LLM(**tiny_model.OPTIONS, memory="32MiB", threads=1, max_length=1024) as found:
        yield found


def spoil(monkeypatch: pytest.MonkeyPatch, llm: LLM, before: int) -> None:
    """Everything that was computed is forgotten before the answer of that number, but the cache does not know."""
    original, calls = SelfTest._answer, []

    def spoilt(self, *arguments):
        calls.append(1)
        if len(calls) == before:
            llm.engine._device.store.buffer.zero_()
        return original(self, *arguments)

    monkeypatch.setattr(SelfTest, "_answer", spoilt)


@pytest.mark.parametrize(("before", "name"), [(2, "prefill-hit"), (4, "decode-hit")])
def test_a_state_that_changed_under_the_cache_is_seen(monkeypatch, llm, before, name):
    spoil(monkeypatch, llm, before)
    found = complaints(SelfTest(llm).run(), "float32")
    assert len(found) == 1
    assert found[0].startswith(f"{name}: KL ")
    assert "the cache is wrong" in found[0]


def test_a_wrong_answer_is_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr("weft.cli.selftest.complaints", lambda found, dtype: ["something"])
    monkeypatch.setattr(SelfTest, "run", lambda self: dict.fromkeys(("cold", "wrong state"), Comparison(0, 0.0, 0.0)))
    assert main(["doctor", *SMALL]) == 1
    assert capsys.readouterr().out.endswith("problem: something\n")


def test_a_test_that_reuses_nothing_or_tells_nothing_is_not_a_pass():
    same = Comparison(cached_tokens=0, difference=0.0, kl=0.0)
    found = dict.fromkeys(("cold", "prefill-hit", "decode-hit", "wrong state"), same)
    assert [each.partition(":")[0] for each in complaints(found, "float32")] == ["prefill-hit", "decode-hit"]
    assert not can_tell(found)
    noisy = found | {"cold": Comparison(0, 1.0, 0.1)}
    assert any("more than float32 explains" in each for each in complaints(noisy, "float32"))


def test_the_self_test_can_be_repeated_with_the_same_result(llm):
    first = SelfTest(llm).run()
    assert first["prefill-hit"].cached_tokens == 128
    assert SelfTest(llm, seed=1).run()["prefill-hit"].cached_tokens == 128
