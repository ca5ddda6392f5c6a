"""Responses with memory and forks over HTTP: what is stored, whose it is, what going on with it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import LONG, RICH
from weft.server.settings import ServerSettings

ONE, TWO, ADMIN = "key-one", "key-two", "key-admin"
SIZES = {"template": RICH, "max_sequences": 16}


def settings(path: Path) -> ServerSettings:
    file = str(path / "tier.responses")
    keys = {"api_keys": (ONE, TWO), "admin_key": ADMIN}
    return ServerSettings(model_name="tiny", responses_bytes=1 << 20, responses_file=file, **keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def served(folder: Path):
    with serving(settings(folder), **SIZES) as server:
        yield server


def ask(served: Served, status: int = 200, key: str = ONE, **body):
    asked = {"input": "Hello", "temperature": 0, "max_output_tokens": 12, "ignore_eos": True, **body}
    found = served.client.post("/v1/responses", json=asked, headers=bearer(key))
    assert found.status_code == status, found.text
    return found.json()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def fork(served: Served, status: int = 200, key: str = ONE, **body):
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **body}
    found = served.client.post("/v1/fork", json=asked, headers=bearer(key))
    assert found.status_code == status, found.text
    return found.json()


def test_a_response_goes_on_with_the_conversation_of_another(served: Served) -> None:
    first = ask(served, input=LONG, instructions="Be brief.")
    assert first["store"] is True
    second = ask(served, input="Why?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    whole = [{"role": "user", "content": LONG}, *first["output"], {"role": "user", "content": "Why?"}]
    assert second["output"][0]["content"] == ask(served, input=whole, store=False)["output"][0]["content"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] - 20
    third = ask(served, input=[{"role": "user", "content": "And?"}], previous_response_id=second["id"])
    items = served.client.get(f"/v1/responses/{third['id']}/input_items", headers=bearer(ONE)).json()
    roles = [item.get("role") for item in items["data"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert (items["first_id"], items["last_id"]) == (items["data"][0]["id"], items["data"][-1]["id"])


def test_openais_client_reads_and_removes_what_it_stored(served: Served) -> None:
    # Its import takes seconds.
    import openai

    client = openai.OpenAI(base_url=served.url + "/v1", api_key=ONE, max_retries=0)
    made = client.responses.create(model="tiny", input="Hello", max_output_tokens=4)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert client.responses.input_items.list(made.id).data[0].role == "user"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="And?", previous_response_id=made.id)


def test_a_streamed_response_is_stored(served: Served) -> None:
    body = {"input": "Hello", "max_output_tokens": 4, "stream": True}
    text = served.client.post("/v1/responses", json=body, headers=bearer(ONE)).text
    last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["response"]
    assert served.client.get(f"/v1/responses/{last['id']}", headers=bearer(ONE)).json() == last


def test_what_is_not_stored_is_not_found(served: Served) -> None:
    made = ask(served, store=False)
    assert made["store"] is False
    assert served.client.get(f"/v1/responses/{made['id']}", headers=bearer(ONE)).status_code == 404


def test_no_key_sees_removes_continues_or_forks_what_another_stored(served: Served) -> None:
    made = ask(served)
    path = f"/v1/responses/{made['id']}"
    for key in (TWO, ADMIN):
        for answer in (
            served.client.get(path, headers=bearer(key)),
            served.client.get(path + "/input_items", headers=bearer(key)),
            served.client.delete(path, headers=bearer(key)),
        ):
            assert answer.status_code == 404
            assert made["id"] in answer.json()["error"]["message"]
        ask(served, 404, key, previous_response_id=made["id"])
        fork(served, 404, key, id=made["id"])
    assert served.client.get(path, headers=bearer(ONE)).status_code == 200


def test_a_fork_goes_on_from_any_token_as_the_answer_did(served: Served) -> None:
    made = ask(served, input=LONG, max_output_tokens=40)
    whole = fork(served, id=made["id"], at=0, max_tokens=40)
    tokens = whole["choices"][0]["token_ids"]
    for at in (1, 17, 40):
        found = fork(served, id=made["id"], at=at, n=3)
        assert [each["token_ids"] for each in found["choices"]] == 3 * [found["choices"][0]["token_ids"]]
        assert found["choices"][0]["token_ids"][: 40 - at] == tokens[at : at + 6]
        assert found["forked"] == {"id": made["id"], "choice": 0, "at": at}
        assert found["usage"]["prompt_tokens"] == made["usage"]["input_tokens"] + at
        assert fork(served, id=made["id"], at=at)["usage"]["computed_tokens"][0] <= 64


def test_a_retained_answer_is_forked_until_its_end_and_by_its_key_only(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for seconds, status in ((60, 200), (0, 404)):
        asked = {**body, "retain": seconds, "return_token_ids": True}
        made = served.client.post("/v1/chat/completions", json=asked, headers=bearer(ONE)).json()
        found = fork(served, status, id=made["id"], at=4)
        fork(served, 404, TWO, id=made["id"], at=4)
        if status == 200:
            assert found["choices"][0]["token_ids"] == made["choices"][0]["token_ids"][4:10]
            assert found["usage"]["computed_tokens"][0] <= 64


def test_a_fork_has_log_probabilities_if_asked(served: Served) -> None:
    made = ask(served)
    whole = fork(served, id=made["id"], at=0, max_tokens=8, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    later = fork(served, id=made["id"], at=5, max_tokens=3, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    assert [len(each["top_logprobs"]) for each in whole["content"]] == 8 * [2]
    for one, other in zip(whole["content"][5:], later["content"], strict=True):
        assert one["token"] == other["token"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    assert "logprobs" not in fork(served, id=made["id"])["choices"][0]


def test_forks_may_have_sampling_values_of_their_own(served: Served) -> None:
    made = ask(served)
    cold, hot = {"temperature": 0}, {"temperature": 2.0, "seed": 3}
    found = fork(served, id=made["id"], choices=[cold, hot, hot, {**hot, "seed": 4}], max_tokens=12)
    texts = [each["token_ids"] for each in found["choices"]]
    assert texts[1] == texts[2]
    assert len({*map(tuple, texts)}) == 3
    assert texts[0] == fork(served, id=made["id"], max_tokens=12)["choices"][0]["token_ids"]


def test_a_fork_can_be_stored_and_forked_again(served: Served) -> None:
    made = ask(served)
    one = fork(served, id=made["id"], at=3, n=2, store=True)
    two = fork(served, id=one["id"], at=5, choice=1)
    assert two["choices"][0]["token_ids"][:4] == one["choices"][1]["token_ids"][2:]
    fork(served, 400, id=one["id"], choice=2)
    assert "a fork is continued" in ask(served, 400, previous_response_id=one["id"])["error"]["message"]


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999"])
def test_items_that_cannot_be_stored_are_refused_before_an_answer(served: Served, value: bytes) -> None:
    made = ask(served)
    for before in (b"", b'"previous_response_id": "%s", ' % made["id"].encode()):
        item = b'{"role": "user", "content": "Hello", "more": %s}' % value
        body = b'{%s"input": [%s], "max_output_tokens": 2}' % (before, item)
        found = served.client.post("/v1/responses", content=body, headers=bearer(ONE))
        assert found.status_code == 400, found.text


def test_a_stored_fork_of_a_running_answer_keeps_its_own_salt(served: Served) -> None:
    salted = {"cache_salt": "pepper", "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 400}
    body = {"prompt": LONG, **salted}
    with served.client.stream("POST", "/v1/completions", json=body, headers=bearer(ONE)) as stream:
        # Kept, because a stream whose reader is dropped is closed.
        lines = stream.iter_lines()
        line = next(each for each in lines if each.startswith("data: "))
        name = json.loads(line.removeprefix("data: "))["id"]
        kept = fork(served, id=name, at=1, store=True)
    # What the salted request computed is found again, so it lies under the same salt.
    assert fork(served, id=kept["id"], at=1)["usage"]["cached_tokens"][0] > 0


def test_a_running_answer_can_be_forked(served: Served) -> None:
    body = {"prompt": "Once upon", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}
    with served.client.stream("POST", "/v1/completions", json=body, headers=bearer(ONE)) as stream:
        # Kept, because a stream whose reader is dropped is closed.
        lines = stream.iter_lines()
        line = next(each for each in lines if each.startswith("data: "))
        name = json.loads(line.removeprefix("data: "))["id"]
        found = fork(served, id=name, at=1)
        fork(served, 404, TWO, id=name)
    # The server notices soon that its client has left.
    asked = {"id": name, "max_tokens": 1}
    wait_until(lambda: served.client.post("/v1/fork", json=asked, headers=bearer(ONE)).status_code == 404)
    again = fork(served, 404, id=name)
    assert "no answer" in again["error"]["message"]
    whole = {**body, "max_tokens": 7, "stream": False, "return_token_ids": None}
    answer = served.client.post("/v1/completions", json=whole, headers=bearer(ONE)).json()
    assert answer["choices"][0]["text"].endswith(found["choices"][0]["text"])


def test_a_streamed_fork_ends_with_its_usage(served: Served) -> None:
    made = ask(served)
    asked = {"id": made["id"], "at": 2, "stream": True, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    lines = served.client.post("/v1/fork", json=asked, headers=bearer(ONE)).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    tokens = [token for each in events[:-1] for token in each["token_ids"]]
    assert tokens == fork(served, id=made["id"], at=2, max_tokens=5)["choices"][0]["token_ids"]
    assert events[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"at": 10**6}, "at"),
        ({"choice": 1}, "choice"),
        ({"n": 33}, "n"),
        ({"n": 2, "choices": [{}]}, "n"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"min_tokens": 7}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_by_its_field(served: Served, body: dict, field: str) -> None:
    made = ask(served)
    assert fork(served, 400, id=made["id"], **body)["error"]["message"].startswith(field)


def test_responses_survive_a_restart_and_leave_with_their_tenant(tmp_path: Path) -> None:
    path = tmp_path / "tier.responses"
    secret = "the owl is in the third tree"
    with serving(settings(tmp_path), **SIZES) as server:
        made, other = ask(server, input=secret), ask(server, key=TWO)
    assert secret.encode() in path.read_bytes()
    with serving(settings(tmp_path), **SIZES) as server:
        assert server.client.get(f"/v1/responses/{made['id']}", headers=bearer(ONE)).json() == made
        ask(server, previous_response_id=made["id"])
        found = server.client.delete("/cache", params={"tenant": "key-1"}, headers=bearer(ADMIN))
        assert found.json()["dropped_responses"] == 2
        assert server.client.get(f"/v1/responses/{made['id']}", headers=bearer(ONE)).status_code == 404
        assert secret.encode() not in path.read_bytes()
        assert server.client.get(f"/v1/responses/{other['id']}", headers=bearer(TWO)).status_code == 200


def test_without_memory_nothing_is_stored_and_only_the_previous_response_is_refused() -> None:
    with serving(ServerSettings(model_name="tiny"), **SIZES) as server:
        made = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 2, "store": True})
        assert made["store"] is False
        body = {"input": "Hello", "previous_response_id": made["id"]}
        assert "--responses-memory" in server.post("/v1/responses", body, 400)["error"]["message"]
        assert server.client.get(f"/v1/responses/{made['id']}").status_code == 400
