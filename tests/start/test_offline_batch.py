"""`weft batch`: a file of requests is answered without a server, and a second run answers what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.servers.asgi import END_TOKENS
from tests.support.servers.fake_engines import InstantEngine, answer, fake_info
from weft.base.errors import OptionError
from weft.base.sampling import SamplingParams
from weft.cli.batch import BatchOptions, files_of
from weft.server.batches.journal import BatchProgress
from weft.server.batches.lines import InvalidBatch
from weft.server.settings import ServerSettings
from weft.start.batch import answer_file
from weft.start.launch import Served, Texts
from weft.start.thread_backend import ThreadBackend

COUNT = 20


def answered(source: Path, target: Path, asked: list[int]) -> BatchProgress:
    class Noting(InstantEngine):
        def add(self, request, constraint=None) -> int:
            asked.append(int(request.prompt[-1]))
            return super().add(request, constraint)

    served = Served(
        lambda: ThreadBackend(lambda: (Noting(), fake_info())),
        lambda info: Texts(None, None, END_TOKENS, SamplingParams()),
    )
    return answer_file(served, ServerSettings(), source, target, lambda progress: None)


def test_a_second_run_answers_only_what_is_missing(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    numbers = range(20, 20 + COUNT)
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": [n], "max_tokens": 2}}
        for n in numbers
    ]
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    first: list[int] = []
    assert answered(source, target, first).completed == COUNT
    assert sorted(first) == [*numbers]
    whole = target.read_bytes().splitlines(keepends=True)
    # As if it had been killed within a line.
    target.write_bytes(b"".join(whole[:5]) + whole[5][:40])
    again: list[int] = []
    done = answered(source, target, again)
    assert (done.completed, len(again)) == (COUNT, COUNT - 5)
    found = [json.loads(each) for each in target.read_bytes().splitlines()]
    assert sorted(int(each["custom_id"]) for each in found) == [*numbers]
    for each in found:
        assert each["response"]["body"]["choices"][0]["token_ids"] == answer([int(each["custom_id"])], 2)


def test_a_file_that_is_no_batch_is_refused_before_a_model_is_loaded(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    with pytest.raises(InvalidBatch, match="line 1"):
        answered(source, tmp_path / "out.jsonl", [])
    assert not (tmp_path / "out.jsonl").exists()


def test_files_are_checked(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("x")
    for given in ({}, {"source": str(source)}, {"source": str(tmp_path), "target": "x"}):
        with pytest.raises(OptionError):
            files_of(BatchOptions(**given))
    with pytest.raises(OptionError, match="another file"):
        files_of(BatchOptions(source=str(source), target=str(source)))
