"""Drafts over HTTP: the fields of a request, the usage, and the metrics. Tiny model."""

from __future__ import annotations

import pytest

from tests.support.servers.http_server import Served, serving
from weft.server.settings import ServerSettings

LETTERS = list(range(ord("a"), ord("z") + 1))


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny"), max_sequences=8) as server:
        yield server


def ask(served: Served, **more) -> tuple[str, dict, int]:
    """The answer in letters, its usage, and the steps that it took."""
    before = served.stats()["steps"]
    found = served.chat("Hello", allowed_token_ids=LETTERS, max_tokens=40, **more)
    return found["choices"][0]["message"]["content"], found["usage"], served.stats()["steps"] - before


def test_a_right_prediction_takes_fewer_steps_and_is_counted(served: Served):
    plain, usage, steps = ask(served, draft=False, cache_salt="plain")
    assert "completion_tokens_details" not in usage
    guess = {"type": "content", "content": plain}
    text, usage, fewer = ask(served, prediction=guess, cache_salt="guess")
    assert text == plain
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 30
    assert details["rejected_prediction_tokens"] == 0
    assert fewer <= steps // 4


def test_a_wrong_prediction_changes_nothing_but_its_count(served: Served):
    plain, *_ = ask(served, draft=False, cache_salt="plain")
    changed = plain[:10] + "".join("z" if c != "z" else "y" for c in plain[10:])
    parts = {"type": "content", "content": [{"type": "text", "text": changed}]}
    text, usage, _ = ask(served, prediction=parts, cache_salt="wrong")
    assert text == plain
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 9
    assert details["rejected_prediction_tokens"] > 0


def test_tokens_with_log_probabilities_say_which_were_drafted(served: Served):
    plain, *_ = ask(served, draft=False, cache_salt="plain")
    wrong = plain[:10] + ("y" if plain[10] == "z" else "z") + plain[11:]
    fields = {"allowed_token_ids": LETTERS, "max_tokens": 40, "logprobs": True, "cache_salt": "drafted"}
    found = served.chat("Hello", prediction={"type": "content", "content": wrong}, **fields)
    tokens = found["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens) == plain
    drafted = [each.get("drafted", False) for each in tokens]
    assert sum(drafted) == found["usage"]["completion_tokens_details"]["accepted_draft_tokens"]
    # The first is the prompt's, the other took the place of a wrong draft.
    assert (drafted[0], drafted[10]) == (False, False)
    assert sum(drafted[1:10]) >= 7


def test_a_bound_of_one_draft_is_kept(served: Served):
    plain, _, steps = ask(served, draft=0, cache_salt="plain")
    guess = {"type": "content", "content": plain}
    text, usage, fewer = ask(served, prediction=guess, draft=1, cache_salt="bound")
    assert text == plain
    details = usage["completion_tokens_details"]
    assert details["draft_tokens"] <= details["draft_steps"]
    assert steps // 2 <= fewer < steps


def test_a_long_prediction_is_read_by_a_worker(served: Served):
    plain, *_ = ask(served, draft=False, cache_salt="plain")
    guess = {"type": "content", "content": plain + "x" * 1500}
    text, usage, _ = ask(served, prediction=guess, cache_salt="long", stop=["\n" + "y" * 900] * 16)
    assert text == plain
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] >= 30


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prediction": {"type": "other", "content": "x"}}, "prediction"),
        ({"prediction": {"type": "content", "content": "x" * 100_000}}, "prediction"),
        ({"draft": 65}, "draft"),
        ({"draft": "yes"}, "draft"),
    ],
)
def test_invalid_fields_are_named(served: Served, fields, named):
    error = served.chat("Hello", status=400, **fields)["error"]
    assert named in (error.get("param") or "") or named in error["message"]


def test_what_a_grammar_forces_takes_one_step(served: Served):
    form = {"choice": ["yes, this is the only answer", "no, this is the only answer"]}
    texts, steps = [], []
    for draft in (False, True):
        before = served.stats()["steps"]
        texts.append(served.say("Hello", structured_outputs=form, draft=draft, max_tokens=40))
        steps.append(served.stats()["steps"] - before)
    assert texts[0] == texts[1]
    assert texts[0] in form["choice"]
    assert steps[1] <= steps[0] // 3


def test_metrics_count_drafts_by_drafter_and_position(served: Served):
    ask(served, draft=False)
    text, *_ = ask(served, cache_salt="plain")
    ask(served, prediction={"type": "content", "content": text}, cache_salt="metrics")
    page = served.client.get("/metrics").text
    assert 'weft_draft_tokens_total{drafter="prediction",position="1",result="accepted"}' in page
    assert 'weft_not_drafted_total{reason="request"}' in page
