"""OpenAI's API through a real socket: every parameter does what it says; public clients work. Tiny model."""

from __future__ import annotations

import json
import math
import subprocess
import threading

import pytest

from tests.support.servers.held_steps import SECONDS
from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import PATH, RICH, TOOLS, saying
from weft.server.apis import openai_completions
from weft.server.settings import ServerSettings


@pytest.fixture(scope="module")
def served():
    settings = ServerSettings(model_name="tiny")
    with serving(settings, template=RICH, max_sequences=16, capture_every=1 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served):
    # Its import takes seconds.
    import openai

    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


# how tokens are chosen ------------------------------------------------------------------------------------------------


def test_temperature_zero_is_greedy_and_a_high_one_is_not(served: Served):
    greedy = served.ids(temperature=0, seed=1)
    assert greedy == served.ids(temperature=0, seed=2)
    assert greedy != served.ids(temperature=5, seed=1)


def test_a_seed_gives_the_same_text_and_another_another(served: Served):
    first = served.ids(temperature=1, seed=1)
    assert first == served.ids(temperature=1, seed=1)
    assert first != served.ids(temperature=1, seed=2)


def test_a_temperature_that_is_not_given_is_one(served: Served):
    body = {"prompt": "Once upon", "max_tokens": 16, "return_token_ids": True, "seed": 3}
    given = served.ids(temperature=1, seed=3)
    assert served.post("/v1/completions", body)["choices"][0]["token_ids"] == given


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_narrowed_sampling_is_greedy_at_any_temperature(served: Served, narrow):
    assert served.ids(temperature=3, seed=1, **narrow) == served.ids(temperature=0)


@pytest.mark.parametrize("off", [{"top_k": -1}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_values_that_mean_off_change_nothing(served: Served, off):
    assert served.ids(temperature=3, seed=1, **off) == served.ids(temperature=3, seed=1)


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2}])
def test_penalties_keep_tokens_from_coming_back(served: Served, penalty):
    bias = {str(token): 40 for token in b"abcdefghijkl"}
    plain = served.ids(logit_bias=bias, max_tokens=12)
    punished = served.ids(logit_bias=bias, max_tokens=12, **penalty)
    assert len(set(punished)) > len(set(plain))


def test_a_bias_forces_and_bans_tokens(served: Served):
    assert served.say(logit_bias={"65": 100}, max_tokens=4) == "AAAA"
    first = served.ids(max_tokens=1)[0]
    assert served.ids(max_tokens=1, logit_bias={str(first): -100})[0] != first


# when to stop ---------------------------------------------------------------------------------------------------------


def test_max_tokens_by_both_names(served: Served):
    for name in ("max_tokens", "max_completion_tokens"):
        found = served.chat(**{"max_tokens": None, name: 5}, logit_bias={"65": 100})
        assert found["usage"]["completion_tokens"] == 5
        assert found["choices"][0]["finish_reason"] == "length"
    both = served.chat(max_tokens=9, max_completion_tokens=3, logit_bias={"65": 100})
    assert both["usage"]["completion_tokens"] == 3


def test_no_max_tokens_means_all_that_fits(served: Served):
    found = served.chat(max_tokens=None, logit_bias={"65": 100}, stop="A" * 64)
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 64


def test_stop_strings_end_an_answer_before_themselves(served: Served):
    assert served.say(**saying("abc, def; ghi")) == "abc, def; ghi"
    for stop, left in ((", d", "abc"), ([";", "ef"], "abc, d")):
        found = served.chat(**saying("abc, def; ghi"), stop=stop)["choices"][0]
        assert found["message"]["content"] == left
        assert found["finish_reason"] == "stop"
    assert found["stop_reason"] == "ef"
    assert served.say(**saying("abc, def; ghi"), stop=";", include_stop_str_in_output=True) == "abc, def;"


def test_stop_token_ids_end_an_answer(served: Served):
    bias = {str(token): 100 for token in b"y"}
    found = served.chat(logit_bias=bias, stop_token_ids=[ord("y")], min_tokens=2)["choices"][0]
    assert found["stop_reason"] == ord("y")
    assert found["finish_reason"] == "stop"
    assert "y" not in found["message"]["content"]
    assert served.chat(logit_bias=bias)["choices"][0]["finish_reason"] == "length"


def test_the_models_end_can_be_put_off_and_ignored(served: Served):
    bias = {"257": 100}
    assert served.chat(logit_bias=bias)["usage"]["completion_tokens"] == 1
    assert served.chat(logit_bias=bias, min_tokens=6)["usage"]["completion_tokens"] == 7
    found = served.chat(logit_bias=bias, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 16


def test_special_tokens_are_shown_only_if_asked(served: Served):
    pad = {"logit_bias": {"258": 100}, "max_tokens": 2}
    assert served.say(**pad) == ""
    assert served.say(**pad, skip_special_tokens=False) == "<|pad|><|pad|>"


# several answers ------------------------------------------------------------------------------------------------------


def test_n_answers_differ_and_each_comes_back_with_its_seed(served: Served):
    asked = {"temperature": 1, "seed": 5, "max_tokens": 12}
    three = served.chat(n=3, **asked)
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in served.chat(n=3, **asked)["choices"]]
    assert texts[0] == served.say(**asked)
    assert three["usage"]["prompt_tokens"] == served.chat(**asked)["usage"]["prompt_tokens"]


def test_n_answers_stream_side_by_side(served: Served):
    body = {"messages": [{"role": "user", "content": "Hello"}], "n": 3, "temperature": 1, "seed": 5, "max_tokens": 12}
    whole = served.post(PATH, body)["choices"]
    texts, ends = ["", "", ""], {}
    for event in served.events(PATH, body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["message"]["content"] for choice in whole]
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole}


def test_a_list_of_prompts_gets_choices_prompt_by_prompt(served: Served):
    found = served.complete(["ab", "cd"], n=2, max_tokens=6)["choices"]
    alone = [served.complete(prompt, max_tokens=6)["choices"][0]["text"] for prompt in ("ab", "cd")]
    assert [choice["text"] for choice in found] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    ids = served.complete([[97, 98], [99, 100]], max_tokens=6)["choices"]
    assert [choice["text"] for choice in ids] == alone


# scores ---------------------------------------------------------------------------------------------------------------


def test_chat_logprobs_have_tokens_bytes_and_alternatives(served: Served):
    found = served.chat(logprobs=True, top_logprobs=3, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert len(found) == served.chat(max_tokens=4)["usage"]["completion_tokens"]
    for entry in found:
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert [each["logprob"] for each in entry["top_logprobs"]] == sorted(
            (each["logprob"] for each in entry["top_logprobs"]), reverse=True
        )
        assert len(entry["top_logprobs"]) == 3
    assert served.chat(max_tokens=4)["choices"][0]["logprobs"] is None
    assert served.chat(logprobs=True, max_tokens=2)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_streamed_scores_are_those_of_the_whole(served: Served):
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 1}
    whole = served.post(PATH, body)["choices"][0]["logprobs"]["content"]
    parts = [c for e in served.events(PATH, body) for c in e["choices"] if c["logprobs"]]
    streamed = [entry for part in parts for entry in part["logprobs"]["content"]]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in whole]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in whole], abs=1e-4)


def test_completion_logprobs_have_offsets(served: Served):
    choice = served.complete(**saying("xyz"), logprobs=2)["choices"][0]
    scores = choice["logprobs"]
    assert scores["tokens"][:3] == ["x", "y", "z"]
    assert scores["text_offset"][:3] == [0, 1, 2]
    assert all(2 <= len(top) <= 3 for top in scores["top_logprobs"])
    assert all(score <= 0 for score in scores["token_logprobs"])


def test_an_echo_brings_the_prompt_and_its_scores(served: Served):
    assert served.complete("abc", echo=True, max_tokens=0)["choices"][0]["text"] == "abc"
    choice = served.complete("abc", echo=True, max_tokens=2, logprobs=1)["choices"][0]
    assert choice["text"].startswith("abc")
    scores = choice["logprobs"]
    assert scores["tokens"][:3] == ["a", "b", "c"]
    assert scores["token_logprobs"][0] is None
    assert scores["text_offset"][:4] == [0, 1, 2, 3]
    assert len(scores["tokens"]) == 5
    # The score of "c" after "ab" is the one that sampling would report for it.
    forced = served.complete("ab", max_tokens=1, logprobs=0, structured_outputs={"choice": ["c"]})
    assert scores["token_logprobs"][2] == pytest.approx(forced["choices"][0]["logprobs"]["token_logprobs"][0], abs=1e-3)
    streamed = served.events("/v1/completions", {"prompt": "abc", "echo": True, "max_tokens": 2, "logprobs": 1})
    assert streamed[0]["choices"][0]["logprobs"]["tokens"][:3] == ["a", "b", "c"]


def test_token_ids_come_if_asked(served: Served):
    found = served.complete("ab", max_tokens=3, return_token_ids=True)["choices"][0]
    assert found["prompt_token_ids"] == [97, 98]
    assert len(found["token_ids"]) == 3
    assert "token_ids" not in served.complete("ab", max_tokens=3)["choices"][0]
    assert served.chat(return_token_ids=True, max_tokens=2)["choices"][0]["token_ids"]


# streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_usage_ends_a_stream_only_if_asked(served: Served, path):
    body = {"prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    body.pop("prompt" if path == PATH else "messages")
    plain = served.events(path, body)
    assert all("usage" not in event for event in plain)
    asked = served.events(path, {**body, "stream_options": {"include_usage": True}})
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in asked[:-1])


def test_many_scores_are_shaped_beside_the_streams_of_others(served: Served, monkeypatch):
    """Here by a thread's name: on the event loop a long prompt's scores would make everybody wait."""
    shaping = []
    plain = openai_completions.Completion.answer

    def seen(*args):
        shaping.append(threading.current_thread().name)
        return plain(*args)

    monkeypatch.setattr(openai_completions.Completion, "answer", seen)
    served.complete("x" * 1000, echo=True, logprobs=20, max_tokens=0)
    served.complete("x", logprobs=20, max_tokens=1)
    assert [name.startswith("asyncio") for name in shaping] == [True, False]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(served: Served, monkeypatch):
    def tokenized(*_):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr("weft.text.tokenizer.Tokenizer.encode_all", tokenized)
    text = "x" * 200_000
    for path, body, field in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/v1/responses", {"input": text}, "input"),
        ("/generate", {"text": text}, "text"),
    ):
        error = served.post(path, body, 400)["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_a_stream_says_what_the_whole_says(served: Served):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "seed": 9, "stop": ["e"]}
    whole = served.post(PATH, body)["choices"][0]
    events = served.events(PATH, body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert len({event["id"] for event in events}) == 1


# clients --------------------------------------------------------------------------------------------------------------


def test_the_openai_client_chats(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "seed": 1, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens is not None


def test_the_openai_client_completes(client):
    asked = {"model": "tiny", "prompt": "Once", "seed": 1, "max_tokens": 12}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_the_openai_client_parses_calls_and_schemas(client):
    found = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=3,
        max_tokens=200,
    )
    (call,) = found.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_the_openai_client_is_told_what_is_wrong(client):
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=1000)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"


def test_curl_gets_an_answer(served: Served):
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0})
    command = ["curl", "-sS", served.url + PATH, "-d", body]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=SECONDS).stdout)
    assert found["choices"][0]["message"]["content"] == served.say(max_tokens=3)
    streamed = subprocess.run([*command[:-1], body[:-1] + ', "stream": true}'], capture_output=True, timeout=SECONDS)
    assert streamed.stdout.endswith(b"data: [DONE]\n\n")


def test_probabilities_sum_to_at_most_one(served: Served):
    top = served.chat(logprobs=True, top_logprobs=20, max_tokens=1)["choices"][0]["logprobs"]["content"][0]
    assert 0 < sum(math.exp(each["logprob"]) for each in top["top_logprobs"]) <= 1.0001
