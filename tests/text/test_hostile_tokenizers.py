"""Regular expressions of a tokenizer.json that fail: one line at the start, a 400 for a text, and nothing hangs."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models import tiny_model
from tests.support.servers.http_server import serving
from weft import builtin
from weft.base.errors import ModelError, RequestError
from weft.server.front import Front
from weft.text.patterns import LINEAR
from weft.text.tokenizer import Tokenizer, load_tokenizer

# Fails on a run of b that no b ends, which no probe has.
LATE = "(b+)+$"
TEXT = "b" * 40 + "!"


def folder_with(folder: Path, **parts: Any) -> Path:
    """The tiny tokenizer with other parts."""
    shutil.copytree(tiny_model.FOLDER, folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


def split(pattern: str) -> dict[str, Any]:
    own = json.loads((tiny_model.FOLDER / "tokenizer.json").read_text())["pre_tokenizer"]
    isolated = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [isolated, own]}


def replace(pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": "c"}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"pre_tokenizer": split("(")}, "cannot use .* as a tokenizer"),
        ({"normalizer": replace("(")}, "cannot use .* as a tokenizer"),
        ({"pre_tokenizer": split("(a+)+$")}, "cannot use .* as a tokenizer: .*retry-limit"),
        ({"normalizer": replace("(a+)+$")}, "cannot use .* as a tokenizer: .*retry-limit"),
        ({"pre_tokenizer": split("a{1000}{1000}")}, "repeat at most 4096 times"),
        ({"pre_tokenizer": split("a{,9999999999999999}")}, "cannot use|repeat at most"),
        ({"pre_tokenizer": split("a|" * 20_000 + "b")}, "at most 16384 characters"),
        ({"pre_tokenizer": 5}, "cannot use .* as a tokenizer"),
        ({"model": {}}, "cannot use .* as a tokenizer"),
    ],
)
def test_a_pattern_that_cannot_work_is_one_line_at_the_start(tmp_path, parts, words):
    folder = folder_with(tmp_path / "model", **parts)
    with pytest.raises(ModelError, match=words) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)
    assert str(folder / "tokenizer.json") in str(error.value)


@pytest.fixture
def late(tmp_path) -> Tokenizer:
    found = load_tokenizer(folder_with(tmp_path / "model", pre_tokenizer=split(LATE)))
    assert found is not None
    return found


def test_a_text_that_a_pattern_fails_on_is_refused_and_the_next_one_is_not(late):
    for _ in range(2):
        with pytest.raises(RequestError, match=r"tokenizer.json fails on: .*retry-limit") as error:
            late.encode(TEXT)
        assert error.value.status == 400
        assert late.encode("Hello") == [72, 101, 108, 108, 111]


def test_interrupts_are_not_taken_for_the_tokenizers(late, monkeypatch):
    class Stopping:
        def encode(self, *text: Any, **more: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(late, "backend", Stopping())
    with pytest.raises(KeyboardInterrupt):
        late.encode("Hello")


def test_a_server_answers_400_and_goes_on(late, monkeypatch):
    monkeypatch.setattr(tiny_model, "tokenizer", lambda: late)
    with serving() as served:
        for path, body in (
            ("/v1/completions", {"prompt": TEXT}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
            ("/generate", {"text": TEXT}),
            ("/tokenize", {"prompt": TEXT}),
        ):
            message = served.post(path, body, status=400)["error"]["message"]
            assert "tokenizer.json fails on" in message, path
            assert served.complete("Hello", max_tokens=1)
        assert "tokenizer.json" in served.complete("Hello " * 100 + TEXT, status=400)["error"]["message"]


# Takes quadratic time on runs of a.
SLOW = "a*b|a"
ASKED = [
    ("/v1/completions", {"prompt": "aaaa", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "aaaa"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "aaaa", "max_output_tokens": 16}),
    ("/generate", {"text": "aaaa", "sampling_params": {"max_new_tokens": 2}}),
    ("/tokenize", {"prompt": "aaaa"}),
]


@pytest.mark.parametrize(("pattern", "elsewhere"), [(SLOW, True), (LINEAR["qwen2"], False)])
def test_texts_for_a_pattern_that_is_not_known_never_hold_up_the_loop(tmp_path, monkeypatch, pattern, elsewhere):
    found = load_tokenizer(folder_with(tmp_path / "model", pre_tokenizer=split(pattern)))
    monkeypatch.setattr(tiny_model, "tokenizer", lambda: found)
    on_the_loop: list[str] = []
    encode_all = Tokenizer.encode_all

    def watched(tokenizer: Tokenizer, texts: Any, special: bool = True) -> list[list[int]]:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            on_the_loop.extend(texts)
        return encode_all(tokenizer, texts, special)

    monkeypatch.setattr(Tokenizer, "encode_all", watched)
    with serving() as served:
        for path, body in ASKED:
            on_the_loop.clear()
            served.post(path, body)
            assert bool(on_the_loop) != elsewhere, path


@pytest.mark.parametrize(("linear", "elsewhere"), [(True, False), (False, True)])
def test_tokens_of_an_answer_are_counted_beside_the_loop_if_that_may_take_long(linear, elsewhere):
    front: Any = SimpleNamespace(tokenizer=SimpleNamespace(is_linear=linear))
    here = threading.get_ident()
    assert (asyncio.run(Front.run_off_loop(front, 1, threading.get_ident)) != here) == elsewhere


def test_patterns_of_every_part_of_a_tokenizer_count(tmp_path):
    for number, parts in enumerate(({"pre_tokenizer": split(SLOW)}, {"normalizer": replace(SLOW)})):
        found = load_tokenizer(folder_with(tmp_path / str(number), **parts))
        assert found is not None
        assert not found.is_linear
    for known in (tiny_model.tokenizer(), load_tokenizer(builtin.FOLDER)):
        assert known is not None
        assert known.is_linear
