"""Regular expressions of a tokenizer.json that fail: one line at the start, a 400 for a text, and nothing hangs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_model
from tests.http_server import serving
from weft.base.errors import ModelError, RequestError
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
        def encode_batch(self, *texts: Any, **more: Any) -> None:
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
        # A long text is tokenized elsewhere.
        assert "tokenizer.json" in served.complete("Hello " * 100 + TEXT, status=400)["error"]["message"]
