"""SGLang's `Engine`: its arguments and dictionaries, with the answers of `LLM`."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest

from tests.support.models import tiny_model
from weft import LLM, Engine, RequestError, SamplingParams

LIMITS = {"memory": "32MiB", "threads": 1, "max_running_requests": 8, "context_length": 1024}
SAMPLING = {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_model.OPTIONS["model"], load_format="dummy", **LIMITS) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected():
    with LLM(**tiny_model.OPTIONS, **LIMITS) as llm:
        yield llm.generate(["Hello", "Bye"], SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=2))


def test_answers_are_those_of_llm(engine, expected):
    one = engine.generate("Hello", SAMPLING)
    assert (one["text"], one["output_ids"]) == (expected[0].text, expected[0].token_ids)
    assert one["meta_info"]["finish_reason"] == {"type": "length"}
    assert (one["meta_info"]["prompt_tokens"], one["meta_info"]["completion_tokens"]) == (5, 10)
    many = engine.generate(["Hello", "Bye"], [SAMPLING, {**SAMPLING, "max_new_tokens": 3}])
    assert [each["output_ids"] for each in many] == [expected[0].token_ids, expected[1].token_ids[:3]]
    assert engine.generate(["Hello"], SAMPLING)[0]["text"] == one["text"]
    ids = engine.generate(input_ids=list(b"Hello"), sampling_params=SAMPLING)
    assert ids["output_ids"] == one["output_ids"]
    assert engine.generate(input_ids=[list(b"Hello")], sampling_params=SAMPLING)[0]["output_ids"] == one["output_ids"]
    assert len(engine.generate("Hello", {**SAMPLING, "n": 2, "temperature": 1})) == 2


def test_log_probabilities_are_pairs_of_number_and_token(engine, expected):
    meta = engine.generate("Hello", SAMPLING, return_logprob=True, top_logprobs_num=2)["meta_info"]
    numbers, tokens, nothing = zip(*meta["output_token_logprobs"], strict=True)
    assert numbers == pytest.approx([each.logprob for each in expected[0].logprobs], abs=1e-4)
    assert (list(tokens), set(nothing)) == (expected[0].token_ids, {None})
    assert [[token for _, token, _ in tops] for tops in meta["output_top_logprobs"]] == [
        [token for token, _ in each.top] for each in expected[0].logprobs
    ]


def test_streams_yield_the_answer_so_far(engine, expected):
    parts = list(engine.generate("Hello", SAMPLING, stream=True))
    assert parts[-1]["text"] == expected[0].text
    assert all(after["text"].startswith(before["text"]) for before, after in pairwise(parts))
    left = engine.generate("Hello", {**SAMPLING, "max_new_tokens": 900}, stream=True)
    next(left)
    left.close()

    async def work():
        whole = await engine.async_generate("Hello", SAMPLING)
        streamed = [each async for each in await engine.async_generate("Hello", SAMPLING, stream=True)]
        return whole, streamed[-1]

    whole, last = asyncio.run(work())
    assert whole["text"] == last["text"] == expected[0].text


def test_forms_and_stops_have_sglangs_names(engine):
    assert engine.generate("Hello", {"regex": "[ab]{3}"})["text"].strip("ab") == ""
    schema = json.dumps({"enum": [{"a": True}, {"a": False}]})
    found = engine.generate("Hello", {"json_schema": schema, "max_new_tokens": 60, "temperature": 0})
    assert json.loads(found["text"]) in ({"a": True}, {"a": False})
    end = engine.generate("Hello", SAMPLING)["output_ids"][4]
    assert engine.generate("Hello", {**SAMPLING, "stop_token_ids": [end]})["meta_info"]["finish_reason"] == {
        "type": "stop",
        "matched": end,
    }


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda e: e.generate(), "prompt or input_ids must be given"),
        (lambda e: e.generate("x", {"max_new_token": 3}), "max_new_token is unknown; did you mean max_new_tokens"),
        (lambda e: e.generate(["x", "y"], [{}]), "sampling_params has 1 entries for 2 prompts"),
        (lambda e: e.generate(["x", "y"], stream=True), "stream takes one prompt"),
        (lambda e: e.generate("x", {"temperature": -1}), "temperature must be"),
    ],
)
def test_what_is_wrong_is_refused_by_name(engine, ask, message):
    with pytest.raises(RequestError, match=message):
        ask(engine)


def test_the_cache_can_be_emptied(engine):
    long = "x" * 200
    cached = [engine.generate(long, SAMPLING)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert engine.flush_cache()
    assert [*cached, engine.generate(long, SAMPLING)["meta_info"]["cached_tokens"]] == [0, 192, 0]
