"""The offline examples, which are written as those of vLLM are, run with weft-small and show what they claim."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from typing import Any

import pytest

from tests.support.fences import ROOT
from weft.offline.result import Result

FOLDER = ROOT / "examples" / "offline"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def check_shape(output: Result) -> None:
    """Check what scripts read of an output."""
    assert output.finished
    assert output.outputs[0].finish_reason in ("stop", "length")
    assert (output.text, output.token_ids) == (output.outputs[0].text, output.outputs[0].token_ids)
    assert [each.index for each in output.outputs] == list(range(len(output.outputs)))
    assert output.num_cached_tokens is not None
    times = output.metrics
    assert times.arrival_time <= times.first_token_time <= times.last_token_time <= times.finished_time


def test_basic():
    program = example("basic")
    outputs = program["main"]()
    assert [each.prompt for each in outputs] == program["PROMPTS"]
    for output in outputs:
        check_shape(output)
        assert len(output.outputs[0].token_ids) <= 24
        assert output.outputs[0].text


def test_chat_reads_the_command_line_and_changes_the_models_parameters():
    outputs = example("chat")["main"](["--max-tokens", "5", "--temperature", "0", "--max-model-len", "256"])
    assert len(outputs) == 4
    assert all("<|im_start|>user\nTell me about cats." in each.prompt for each in outputs)
    assert {tuple(each.outputs[0].token_ids) for each in outputs} == {tuple(outputs[0].outputs[0].token_ids)}
    assert len(outputs[0].outputs[0].token_ids) == 5


def test_structured_outputs_have_the_form_of_their_prompt():
    choice, regex, schema, grammar = (each.outputs[0].text for each in example("structured_outputs")["main"]())
    assert choice in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{1,9}\.[a-z]{1,9}@[a-z]{2,9}\.com", regex)
    assert json.loads(schema).keys() == {"brand", "kind"}
    assert re.fullmatch("SELECT col_[12] from table_[12]", grammar)


@pytest.mark.thorough
def test_prefix_caching_changes_no_answer():
    without, cached = example("prefix_caching")["main"]()
    assert [each.outputs[0].text for each in cached] == [each.outputs[0].text for each in without]
    assert [each.num_cached_tokens for each in without] == [0] * 4
    assert [each.num_cached_tokens for each in cached] == [128] * 4


@pytest.mark.thorough
def test_several_answers():
    found = example("several_answers")["main"]()
    for output in found["several"]:
        check_shape(output)
        assert len({tuple(each.token_ids) for each in output.outputs}) == 3
        for each in output.outputs:
            assert each.cumulative_logprob == pytest.approx(sum(score.logprob for score in each.logprobs))
            assert [next(iter(score)) for score in each.logprobs] == each.token_ids
    assert all(len(each.outputs) == 1 for each in found["best"])
    for each in found["beams"]:
        sums = [sequence.cum_logprob for sequence in each.sequences]
        assert len(sums) == 3
        assert sums == sorted(sums, reverse=True)


@pytest.mark.thorough
def test_more_prompts_than_run_at_once():
    outputs = example("batch")["main"](count=200)
    assert [each.prompt for each in outputs] == [f"Story {number}:" for number in range(200)]
    assert all(len(each.outputs[0].token_ids) == 2 for each in outputs)


def test_async_streaming():
    program = example("async_streaming")
    texts = asyncio.run(program["main"]())
    assert len(texts) == len(program["PROMPTS"])
    assert all(texts)
