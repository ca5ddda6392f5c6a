"""llama.cpp's and LM Studio's routes: shapes on the wire, and what they share with the others. Tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import SCHEMA
from weft.server.settings import ServerSettings
from weft.text.infill import Infill

ASKED = {"prompt": "Once upon", "temperature": 0, "n_predict": 12}
KEYS = ServerSettings(api_keys=("first-key", "second-key"), model_name="tiny")


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny"), max_sequences=8) as server:
        yield server


def events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.client.stream("POST", "/completion", json=body | {"stream": True}) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line]


def test_a_completion_is_that_of_the_other_routes(served: Served):
    found = served.post("/completion", ASKED)
    same = served.complete(max_tokens=12, return_token_ids=True)
    assert found["content"] == same["choices"][0]["text"]
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 12)
    assert found["tokens_evaluated"] == same["usage"]["prompt_tokens"] == 9
    assert (found["prompt"], found["tokens"], found["model"]) == ("Once upon", [], "tiny")
    assert found["timings"]["predicted_n"] == 12
    assert found["generation_settings"]["n_predict"] == 12
    assert served.post("/completions", ASKED | {"return_tokens": True})["tokens"] == same["choices"][0]["token_ids"]


def test_a_stream_ends_with_the_facts_and_no_mark(served: Served):
    *pieces, last = events(served, ASKED)
    whole = served.post("/completion", ASKED)
    assert "".join(each["content"] for each in [*pieces, last]) == whole["content"]
    assert [each["stop"] for each in pieces] == [False] * len(pieces)
    assert (last["stop"], last["stop_type"]) == (True, "limit")


def test_prompts_may_be_token_ids_or_several(served: Served):
    ids = served.post("/tokenize", {"content": "Once upon"})["tokens"]
    assert (
        served.post("/completion", ASKED | {"prompt": ids})["content"] == served.post("/completion", ASKED)["content"]
    )
    many = served.post("/completion", ASKED | {"prompt": ["Once upon", ids]})
    assert [each["index"] for each in many] == [0, 1]
    assert len({each["content"] for each in many}) == 1


def test_sampling_stops_and_forms_are_followed(served: Served):
    plain = served.post("/completion", ASKED)["content"]
    word = served.post("/completion", ASKED | {"n_predict": -1, "stop": [plain[5]]})
    assert (word["stop_type"], word["stopping_word"]) == ("word", plain[5])
    assert word["content"] == plain[: plain.index(plain[5])]
    form = served.post("/completion", ASKED | {"n_predict": 60, "json_schema": SCHEMA})
    assert set(json.loads(form["content"])) == {"size", "good"}
    assert served.post("/completion", ASKED | {"n_predict": 60, "grammar": 'root ::= "yes"'})["content"] == "yes"
    penal = served.post("/completion", ASKED | {"repeat_penalty": 1.7, "n_predict": 24})["content"]
    assert penal == served.complete(max_tokens=24, repetition_penalty=1.7)["choices"][0]["text"]
    assert penal != served.complete(max_tokens=24)["choices"][0]["text"]
    first = served.ids(max_tokens=1)[0]
    for bias in ([[first, False]], {str(first): False}, [[first, -100]]):
        banned = served.post("/completion", ASKED | {"logit_bias": bias, "return_tokens": True})
        assert first not in banned["tokens"]
    assert served.post("/completion", ASKED | {"logit_bias": False})["content"]
    assert served.post("/completion", ASKED | {"ignore_eos": True, "seed": -1, "cache_prompt": True})["content"]


def test_probabilities_come_with_ids(served: Served):
    found = served.post("/completion", ASKED | {"n_probs": 2, "n_predict": 2})["completion_probabilities"]
    assert len(found) == 2
    for each in found:
        assert each["logprob"] <= 0
        assert each["top_logprobs"][0]["id"] == each["id"]
        assert len(each["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, "x"]}, "prompt"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": 1 << 30}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [[9999, 1]]}, "logit_bias"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 5}, "repeat_last_n"),
        ({"mirostat": 2}, "mirostat"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(served: Served, body, param):
    assert served.post("/completion", ASKED | body, 400)["error"]["param"] == param


def test_a_model_without_the_tokens_fills_nothing_in(served: Served):
    body = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 4}
    error = served.post("/infill", body, 400)["error"]
    assert (error["param"], "fill-in-the-middle" in error["message"]) == ("input_suffix", True)
    asked = {"model": "tiny", "prompt": "a", "suffix": "b", "stream": False}
    assert "fill-in-the-middle" in served.post("/api/generate", asked, 400)["error"]


def test_a_model_with_the_tokens_fills_in(served: Served, monkeypatch):
    monkeypatch.setattr(Infill, "of", lambda tokenizer: Infill(1, 2, 3))
    body = {"input_prefix": "def f(", "input_suffix": "): pass", "temperature": 0, "n_predict": 6}
    asked = {"model": "tiny", "prompt": "def f(", "suffix": "): pass", "options": {"temperature": 0, "num_predict": 6}}
    same = served.post("/infill", body)["content"]
    assert served.post("/api/generate", asked | {"stream": False})["response"] == same
    more = body | {"prompt": "x", "input_extra": [{"filename": "a.py", "text": "y"}]}
    found = served.post("/infill", more)
    ids = [*b"a.py\ny\n", 1, *b"def f(", 2, *b"): pass", 3, *b"x"]
    assert found["content"] == served.post("/completion", ASKED | {"prompt": ids, "n_predict": 6})["content"]
    assert found["tokens_evaluated"] == len(ids)
    too_many = body | {"input_extra": [{"text": "y"}] * 65}
    assert served.post("/infill", too_many, 400)["error"]["param"] == "input_extra"
    assert "insert" in served.post("/api/show", {"model": "tiny"})["capabilities"]


def test_props_and_slots_say_what_runs(served: Served):
    props = served.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert (props["model_alias"], props["total_slots"]) == ("tiny", 8)
    assert served.client.get("/slots").json() == []


def test_slots_show_the_callers_own_requests_only():
    body = {**ASKED, "n_predict": 1000, "ignore_eos": True, "stream": True}
    with serving(KEYS, max_sequences=4) as server:
        first, second = ({"authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
        with server.client.stream("POST", "/completion", json=body, headers=first) as answer:
            # Kept, because a stream whose reader is dropped is closed.
            lines = answer.iter_lines()
            next(lines)
            assert server.client.get("/slots", headers=second).json() == []
            [slot] = server.client.get("/slots", headers=first).json()
            assert slot["n_prompt_tokens"] == 9
            assert slot["is_processing"]
            assert "prompt" not in slot


def test_tokens_by_llama_cpps_names(served: Served):
    found = served.post("/tokenize", {"content": "Hé", "with_pieces": True})
    assert [each["id"] for each in found["tokens"]] == [72, 195, 169]
    assert found["tokens"][0]["piece"] == "H"
    assert served.post("/tokenize", {"content": "H", "add_special": True, "parse_special": True})["tokens"] == [72]
    back = served.post("/detokenize", {"tokens": [72, 105]})
    assert back["content"] == back["prompt"] == "Hi"
    for body in ({"content": "a", "prompt": "b"}, {"content": "a", "parse_special": False}, {}):
        assert served.post("/tokenize", body, 400)


def test_lm_studios_routes_are_openais_under_another_path(served: Served):
    [card] = served.client.get("/api/v0/models").json()["data"]
    assert (card["id"], card["state"], card["max_context_length"]) == ("tiny", "loaded", 2048)
    assert served.client.get("/api/v0/models/tiny").json() == card
    missing = served.client.get("/api/v0/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    asked = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
    found = served.post("/api/v0/chat/completions", asked)
    assert found["choices"][0]["message"]["content"] == served.say(max_tokens=8)
    whole = served.post("/api/v0/completions", {"prompt": "Once upon", "temperature": 0, "max_tokens": 8})
    assert whole["choices"][0]["text"] == served.complete(max_tokens=8)["choices"][0]["text"]
