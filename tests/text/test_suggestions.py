"""Who says nothing about sampling gets what the model's makers suggest; who says something gets that."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.models import tiny_model
from weft import LLM, ModelError
from weft.base.sampling import SamplingParams
from weft.cli.main import main
from weft.server.settings import Limits
from weft.server.texts.schemas import SamplingFields, sampling_params
from weft.text.suggestions import suggested_params

GREEDY = SamplingParams(temperature=0.0)
SMALL = {"weights": "dummy", "memory": "16MiB", "threads": 1, "max_length": 512, "progress": False}


@pytest.fixture
def folder(tmp_path):
    """The tiny model, whose makers suggest to be greedy."""
    shutil.copytree(tiny_model.FOLDER, tmp_path / "tiny")
    suggest(tmp_path / "tiny", temperature=0.0, eos_token_id=[257])
    return tmp_path / "tiny"


def suggest(folder, **values) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_what_is_stated_takes_the_place_of_the_usual(tmp_path):
    assert suggested_params(tmp_path) == SamplingParams()
    suggest(tmp_path, temperature=0.6, top_k=20, top_p=None, do_sample=True, max_new_tokens=7)
    assert suggested_params(tmp_path) == SamplingParams(temperature=0.6, top_k=20)


def test_what_nobody_could_sample_with_is_an_error_that_names_the_file(tmp_path):
    suggest(tmp_path, temperature="hot")
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature must be"):
        suggested_params(tmp_path)


def test_a_body_is_obeyed_where_it_speaks():
    makers = SamplingParams(temperature=0.5, top_k=9, top_p=0.8, min_p=0.1, repetition_penalty=1.2)
    silent = sampling_params(SamplingFields(), Limits(), 256, suggested=makers)
    assert silent == makers
    given = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sampling_params(SamplingFields(**given), Limits(), 256, suggested=makers) == GREEDY


def test_a_prompt_without_parameters_is_answered_as_suggested(folder):
    with LLM(str(folder), **SMALL) as llm:
        assert llm.suggested == GREEDY
        expected = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=256))[0].token_ids
        assert llm.generate("Hello")[0].token_ids == expected
        assert llm.generate("Hello", SamplingParams(seed=1))[0].token_ids != expected


def test_commands_follow_the_suggestion_unless_told_otherwise(folder, capsys):
    options = ["--model", str(folder), "--weights", "dummy", "--memory", "16MiB", "--threads", "1", "--no-stats"]
    said = []
    for more in ([], ["--temperature", "0"], ["--temperature", "1"]):
        assert main(["generate", "Hello", *options, "--max-tokens", "24", *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
