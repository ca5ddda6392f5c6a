"""The native API through a real socket, as SGLang's clients and test kits use it. Tiny model."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.servers.http_server import Served, serving
from weft.server.settings import ServerSettings

LONG = "The quick brown fox jumps over the lazy dog. " * 6
# Tokens of an answer that cannot be complete before the test ends it.
ENDLESS = 30_000


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(), max_sequences=16, max_length=32768, memory="64MiB") as server:
        yield server


def test_text_and_ids_are_the_same_prompt(served: Served):
    by_text = served.generate("Once upon")
    ids = list(b"Once upon")
    by_ids = served.post("/generate", {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
    assert by_ids["output_ids"] == by_text["output_ids"]
    assert by_ids["text"] == by_text["text"]
    meta = by_text["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (9, 8)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert by_text["output_ids"] == served.ids("Once upon", max_tokens=8)


def test_a_list_gets_a_list(served: Served):
    alone = [served.generate(text)["output_ids"] for text in ("ab", "cd")]
    assert [each["output_ids"] for each in served.generate(["ab", "cd"])] == alone
    body = {"input_ids": [[97, 98], [99, 100]], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    assert [each["output_ids"] for each in served.post("/generate", body)] == alone
    params = [{"temperature": 0, "max_new_tokens": 3}, {"temperature": 0, "max_new_tokens": 5}]
    found = served.post("/generate", {"text": ["ab", "cd"], "sampling_params": params})
    assert [len(each["output_ids"]) for each in found] == [3, 5]


def test_n_answers_in_a_list(served: Served):
    sampling = {"n": 3, "temperature": 1, "sampling_seed": 4}
    found = served.generate("ab", sampling=sampling)
    assert len({tuple(each["output_ids"]) for each in found}) == 3
    assert [each["output_ids"] for each in served.generate("ab", sampling=sampling)] == [
        each["output_ids"] for each in found
    ]


def test_nothing_new_is_only_read(served: Served):
    found = served.generate(LONG, sampling={"max_new_tokens": 0}, cache_salt="read")
    assert found["output_ids"] == []
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    again = served.generate(LONG, sampling={"max_new_tokens": 0}, cache_salt="read")
    assert again["meta_info"]["cached_tokens"] == (len(LONG) - 1) // 64 * 64
    assert served.generate(LONG, extra_key="other")["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["miss"]["reason"] == "nothing_more"


@pytest.mark.parametrize(
    ("sampling", "check"),
    [
        ({"logit_bias": {"65": 100}}, lambda a: a["text"] == "A" * 8),
        ({"logit_bias": {"257": 100}}, lambda a: a["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}),
        ({"logit_bias": {"257": 100}, "ignore_eos": True}, lambda a: len(a["output_ids"]) == 8),
        ({"logit_bias": {"257": 100}, "min_new_tokens": 3}, lambda a: len(a["output_ids"]) == 4),
        (
            {"logit_bias": {"65": 100}, "stop": "AAA"},
            lambda a: (a["text"], a["meta_info"]["finish_reason"]["matched"]) == ("", "AAA"),
        ),
        ({"logit_bias": {"65": 100}, "stop": ["AAA"], "no_stop_trim": True}, lambda a: a["text"] == "AAA"),
        ({"logit_bias": {"65": 100}, "stop_token_ids": [65]}, lambda a: len(a["output_ids"]) == 1),
        ({"logit_bias": {"258": 100}, "skip_special_tokens": False}, lambda a: a["text"] == "<|pad|>" * 8),
        ({"logit_bias": {"258": 100}}, lambda a: a["text"] == ""),
        ({"regex": "[0-9]{4}", "max_new_tokens": 20}, lambda a: len(a["text"]) == 4 and a["text"].isdigit()),
        ({"json_schema": '{"const": 7}', "max_new_tokens": 20}, lambda a: a["text"].strip() == "7"),
        ({"json_schema": {"const": 7}, "max_new_tokens": 20}, lambda a: a["text"].strip() == "7"),
        ({"ebnf": 'start: "ab"', "max_new_tokens": 20}, lambda a: a["text"] == "ab"),
    ],
)
def test_sampling_parameters_are_heard(served: Served, sampling, check):
    found = served.generate("x", sampling=sampling)
    assert check(found), found


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_narrowed_sampling_is_greedy(served: Served, narrow):
    hot = {"temperature": 4, "sampling_seed": 1}
    greedy = served.generate("x")["output_ids"]
    assert served.generate("x", sampling={**hot, **narrow})["output_ids"] == greedy
    assert served.generate("x", sampling={**hot, "top_k": 1 << 30})["output_ids"] != greedy


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2}])
def test_penalties_keep_tokens_from_coming_back(served: Served, penalty):
    bias = {"logit_bias": {str(token): 40 for token in b"abcdefghijkl"}, "max_new_tokens": 12}
    plain = served.generate("x", sampling=bias)["output_ids"]
    assert len(set(served.generate("x", sampling={**bias, **penalty})["output_ids"])) > len(set(plain))


def test_scores_of_outputs_and_inputs(served: Served):
    plain = served.generate("abcd")["meta_info"]
    assert "output_token_logprobs" not in plain
    answer = served.generate("abcd", return_logprob=True, top_logprobs_num=2, sampling={"max_new_tokens": 3})
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["input_token_logprobs"] == [[None, ord("d"), None]]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    assert [top[0][1] for top in meta["output_top_logprobs"]] == answer["output_ids"]
    scored = served.generate("abcd", return_logprob=True, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == list(b"abcd")
    assert scored[0][0] is None
    assert all(entry[0] < 0 for entry in scored[1:])
    later = served.generate("abcd", return_logprob=True, logprob_start_len=2)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in later] == list(b"cd")
    assert later[1][0] == pytest.approx(scored[3][0], abs=1e-4)
    texts = served.generate("abcd", return_logprob=True, return_text_in_logprobs=True, logprob_start_len=0)
    assert [entry[2] for entry in texts["meta_info"]["input_token_logprobs"]] == list("abcd")


def test_scores_from_a_position_on_reuse_what_lies_before_it(served: Served):
    text = "".join(chr(97 + n * n % 26) for n in range(300))
    scored = {"text": text, "return_logprob": True, "top_logprobs_num": 2, "sampling": {"max_new_tokens": 0}}
    whole = served.generate(**scored, logprob_start_len=0)["meta_info"]
    assert (whole["cached_tokens"], len(whole["input_token_logprobs"])) == (0, 300)
    for start, cached in ((0, 0), (63, 0), (200, 192), (256, 256), (298, 256)):
        part = served.generate(**scored, logprob_start_len=start)["meta_info"]
        assert part["cached_tokens"] <= cached, start
        for field in ("input_token_logprobs", "input_top_logprobs"):
            found, expected = part[field][1:], whole[field][start + 1 :]
            assert flat(found) == pytest.approx(flat(expected), abs=1e-4), (start, field)
        if start == 256:
            assert (part["cached_tokens"], part["miss"]["lost_tokens"]) == (256, 0)
        if start == 0:
            assert (part["miss"]["reason"], part["miss"]["lost_tokens"]) == ("scores_wanted", 256)


def flat(values: Any) -> list[float]:
    return [each for value in values for each in (flat(value) if isinstance(value, list) else [value or 0])]


def test_an_answer_scored_again_has_the_same_scores(served: Served):
    """What test kits do: generate with scores, then read prompt and answer with max_new_tokens 0 and compare."""
    first = served.generate("abcd", return_logprob=True, sampling={"max_new_tokens": 12, "ignore_eos": True})
    ids = list(b"abcd") + first["output_ids"]
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 0}, "return_logprob": True}
    again = served.post("/generate", {**body, "logprob_start_len": 0})["meta_info"]["input_token_logprobs"]
    expected = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
    assert [entry[0] for entry in again[4:]] == pytest.approx(expected, abs=1e-3)


def test_a_stream_grows_to_the_whole(served: Served):
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    whole = served.generate("abcd", sampling=sampling)
    events = served.events("/generate", {"text": "abcd", "sampling_params": sampling})
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    for shorter, longer in pairwise(events):
        assert longer["output_ids"][: len(shorter["output_ids"])] == shorter["output_ids"]
    many = served.events("/generate", {"text": ["ab", "cd"], "sampling_params": sampling})
    assert {event["index"] for event in many} == {0, 1}


def test_abort_ends_a_request_by_its_name(served: Served):
    found = {}

    def work() -> None:
        sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
        found.update(served.generate("x", sampling=sampling, rid="mine"))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: served.stats()["running"] == 1)
    assert served.post("/abort_request", {"rid": "another"}) == {"aborted": 0}
    assert served.post("/abort_request", {"rid": "mine"}) == {"aborted": 1}
    thread.join()
    assert found["meta_info"]["id"] == "mine"
    assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert served.stats()["leases"] == 0


def test_abort_all_ends_all(served: Served):
    answers = []
    body = {"prompt": "x", "max_tokens": ENDLESS, "ignore_eos": True}
    threads = [threading.Thread(target=lambda: answers.append(served.post("/v1/completions", body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: served.stats()["running"] == 3)
    assert served.post("/abort_request", {"abort_all": True}) == {"aborted": 3}
    for thread in threads:
        thread.join()
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 3


def test_flush_forgets_everything(served: Served):
    served.generate(LONG)
    assert served.generate(LONG)["meta_info"]["cached_tokens"] > 0
    assert served.post("/flush_cache", None) == {"success": True, "cached_tokens": 0}
    assert served.stats()["cells"] == 0
    assert served.generate(LONG)["meta_info"]["cached_tokens"] == 0


def test_facts_about_server_and_model(served: Served):
    for path in ("/model_info", "/get_model_info"):
        info = served.client.get(path).json()
        assert (info["vocab_size"], info["is_generation"], info["has_tokenizer"]) == (259, True, True)
    served.generate(LONG)
    facts = served.client.get("/server_info").json()
    assert facts["max_length"] == 32768
    assert facts["quantize"] == "off"
    assert sum(facts["weights"]["bytes"].values()) >= facts["weights"]["decode_bytes"] > 0
    page = served.client.get("/metrics").text
    [line] = [line for line in page.splitlines() if line.startswith("weft_weights_decode_bytes ")]
    assert float(line.split()[1]) == facts["weights"]["decode_bytes"]
    assert 'weft_weights_bytes{format="float32"}' in page
    assert facts["stats"]["steps"] > 0
    # What SGLang's own tests ask before they look for hits.
    assert served.client.get("/get_server_info").json()["disable_radix_cache"] is False
    assert (facts["chunked_prefill_size"], facts["page_size"]) == (2048, 64)
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/health_generate").status_code == 200
    assert served.client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert served.client.get("/v1/models/other").status_code == 404


def test_a_cache_that_is_off_is_reported_in_sglangs_words():
    with serving(cache=False) as served:
        assert served.client.get("/server_info").json()["disable_radix_cache"] is True


def test_metrics_and_cache_report_are_there(served: Served):
    served.generate(LONG)
    page = served.client.get("/metrics").text
    assert "weft_engine_up 1.0" in page
    assert 'weft_http_requests_total{method="POST",route="/generate",status="200"}' in page
    assert 'weft_requests_total{reason="length"}' in page
    assert "weft_requests_open 0.0" in page
    assert served.client.get("/cache").status_code == 200
    assert served.client.get("/cache?limit=x").status_code == 400


def test_tokens_and_texts(served: Served):
    found = served.post("/tokenize", {"prompt": "hé<|end|>", "return_token_strs": True})
    assert found["tokens"] == [104, 195, 169, 257]
    assert found["count"] == 4
    assert found["token_strs"][3] == "<|end|>"
    assert served.post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "hé<|end|>", "content": "hé<|end|>"}
    messages = [{"role": "user", "content": "Hi"}]
    opened = served.post("/tokenize", {"messages": messages})["count"]
    closed = served.post("/tokenize", {"messages": messages, "add_generation_prompt": False})["count"]
    assert opened - closed == len("<|start|>") - 8 + len("assistant\n")
    assert served.chat("Hi")["usage"]["prompt_tokens"] == opened


def test_special_tokens_at_the_start_belong_to_prompts_and_not_to_conversations():
    with serving(start=True) as server:
        assert server.post("/tokenize", {"prompt": "ab"})["tokens"] == [256, 97, 98]
        assert server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})["tokens"] == [97, 98]
        assert server.complete("ab", max_tokens=1)["usage"]["prompt_tokens"] == 3
        messages = [{"role": "user", "content": "ab"}]
        assert server.post("/tokenize", {"messages": messages})["tokens"].count(256) == 2


def test_without_a_tokenizer_ids_are_served_and_texts_refused():
    with serving(texts=False) as server:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        found = server.post("/generate", {**body, "return_logprob": True})
        assert len(found["output_ids"]) == 4
        assert found["text"] == ""
        choice = server.complete([1, 2, 3], max_tokens=4, logprobs=1)["choices"][0]
        assert choice["token_ids"] == found["output_ids"]
        assert choice["logprobs"]["tokens"][0] == f"token_id:{found['output_ids'][0]}"
        streamed = server.events("/v1/completions", {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 4})
        assert [token for event in streamed for token in event["choices"][0]["token_ids"]] == found["output_ids"]
        for answer in (
            server.generate("text", 400),
            server.complete("text", 400),
            server.chat("text", 400),
            server.post("/tokenize", {"prompt": "x"}, 400),
            server.post("/v1/responses", {"input": "x"}, 400),
            server.complete([1], 400, stop="x"),
        ):
            assert "tokenizer" in answer["error"]["message"]
        assert server.complete([1], 400, structured_outputs={"regex": "a"})["error"]["message"]


def test_digests_come_only_if_asked_for(served: Served):
    found = served.generate("Once upon", logits_digest=True)["meta_info"]["logits_digests"]
    assert len(found) == 8
    assert all(len(each) == 16 for each in found)
    assert "logits_digests" not in served.generate("Once upon")["meta_info"]
