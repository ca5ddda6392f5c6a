"""Fields of other servers: each is understood, refused by name, or ignored, as one table says. Tiny model."""

from __future__ import annotations

import json
import logging

import pytest

from tests.support.fences import ROOT
from tests.support.models import tiny_model
from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import RICH, saying
from weft.answers.followed import FollowedAnswer
from weft.base.errors import InvalidField
from weft.server.apis.field_reference import READERS, rewritten
from weft.server.settings import ServerSettings
from weft.server.texts import fields
from weft.text.infill import Infill

# Of Ollama's API: one token, at once.
ONE = {"options": {"num_predict": 1}, "stream": False}
BODIES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "completion": ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    "response": ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "generate": ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}),
    "sampling_params": ("/generate", {"text": "Hi"}),
    "ollama_chat": (
        "/api/chat",
        {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **ONE},
    ),
    "ollama_generate": ("/api/generate", {"model": "tiny", "prompt": "Hi", **ONE}),
    "options": ("/api/generate", {"model": "tiny", "prompt": "Hi", "stream": False}),
    "llama_completion": ("/completion", {"prompt": "Hi", "n_predict": 1}),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}),
}
# Objects in bodies: the body's reader, and what a small answer needs in it.
WITHIN = {"sampling_params": ("generate", {"max_new_tokens": 1}), "options": ("ollama_generate", {"num_predict": 1})}
PARTS = {part: dict(READERS[reader].parts)[part] for part, (reader, _) in WITHIN.items()}
KINDS = {name: reader.kind for name, reader in READERS.items()} | PARTS


@pytest.fixture(scope="module")
def served():
    settings = ServerSettings(model_name="tiny")
    with pytest.MonkeyPatch.context() as patch:
        # The tiny model has no tokens for it.
        patch.setattr(Infill, "of", lambda tokenizer: Infill(1, 2, 3))
        with serving(settings, template=RICH, max_sequences=16, capture_every=1 << 20) as server:
            yield server


@pytest.fixture(scope="module")
def strict():
    with serving(ServerSettings(strict_fields=True), template=RICH) as server:
        yield server


def sent(route: str, name: str, value: object) -> tuple[str, dict]:
    return sent_all(route, {name: value})


def sent_all(route: str, more: dict) -> tuple[str, dict]:
    path, body = BODIES[route]
    if route in WITHIN:
        return path, {**body, route: {**WITHIN[route][1], **more}}
    return path, {**body, **more}


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    "field", [b'"typical_p": 1e999', b'"typical_p": "\xff"', b'"\xff": 1', b'"typical_p": "\\ud800"']
)
def test_values_and_names_that_cannot_be_decoded_are_the_clients_error(served: Served, route, field):
    path, body = sent_all(route, {"MARK": 1})
    data = json.dumps(body).encode().replace(b'"MARK": 1', field)
    answer = served.client.post(path, content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


# the table ------------------------------------------------------------------------------------------------------------


def test_every_field_has_one_treatment_on_a_route():
    for route, kind in KINDS.items():
        names = [rule.name for rule in fields.RULES if route in rule.routes]
        assert len(names) == len(set(names)), f"{route}: {sorted({n for n in names if names.count(n) > 1})}"
        assert not fields.understood(kind).intersection(names), route


def test_the_documentation_has_the_table():
    page = (ROOT / "docs" / "api.md").read_text()
    assert rewritten(page) == page, "run python -m weft.server.apis.field_reference docs/api.md"


def checked(route: str, body: dict) -> list[str]:
    name = WITHIN[route][0] if route in WITHIN else route
    kind, parts = KINDS[name], READERS[name].parts
    return fields.check_fields(json.dumps(body).encode(), name, kind, parts, strict=True)


@pytest.mark.parametrize("route", BODIES)
def test_refused_fields_are_refused_by_name_unless_they_are_off(served: Served, route):
    rules = [rule for rule in fields.RULES if route in rule.routes and rule.treatment == "refused"]
    assert len(rules) > 40
    where = f"{route}." if route in WITHIN else ""
    for rule in rules:
        with pytest.raises(InvalidField, match=f"^{where}{rule.name} is ") as caught:
            checked(route, sent(route, rule.name, 0.77)[1])
        assert caught.value.field == where + rule.name
        for value in (None, *rule.neutral):
            checked(route, sent(route, rule.name, value)[1])
    # The same through HTTP: one refused field, then all of them at once with values that change nothing.
    error = served.post(*sent(route, rules[0].name, 0.77), 400)["error"]
    # Anthropic's and Ollama's errors have no field.
    named = error if isinstance(error, str) else error.get("param", error["message"])
    assert named.split()[0] == where + rules[0].name
    assert served.post(*sent_all(route, {rule.name: [None, *rule.neutral][-1] for rule in rules}))


@pytest.mark.parametrize("route", BODIES)
def test_ignored_fields_change_nothing(served: Served, route, caplog):
    names = [rule.name for rule in fields.RULES if rule.treatment == "ignored" and route in rule.routes]
    for value in (True, "x", {"z": [1]}):
        assert served.post(*sent_all(route, dict.fromkeys(names, value)))
    assert "unknown" not in caplog.text


@pytest.mark.parametrize("field", ["typical_p", "length_penalty", "do_sample", "separate_reasoning", "best_of"])
def test_a_value_that_is_off_for_another_field_is_not_off_for_this_one(served: Served, field):
    value = {"typical_p": 0, "length_penalty": 0, "do_sample": False, "separate_reasoning": False, "best_of": 2}[field]
    assert served.chat(status=400, **{field: value})["error"]["param"] == field


def test_sampling_parameters_outside_their_object_are_refused(served: Served):
    error = served.post("/generate", {"text": "x", "temperature": 0.5}, 400)["error"]
    assert (error["param"], error["message"]) == (
        "temperature",
        "temperature is not supported here; put it into sampling_params",
    )
    many = {"text": ["x", "y"], "sampling_params": [{}, {"typical_p": 0.5}]}
    assert served.post("/generate", many, 400)["error"]["param"] == "sampling_params.typical_p"


def test_constraints_by_llama_cpps_names_are_followed(served: Served):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(served.say(json_schema=schema, max_tokens=50)) == {"a": 1}
    assert served.say(grammar='root ::= "yes"', max_tokens=50) == "yes"
    error = served.chat(status=400, grammar='root ::= "yes"', json_schema=schema)["error"]
    assert error["param"] == "grammar"


# unknown fields -------------------------------------------------------------------------------------------------------


def test_unknown_fields_are_logged_once_with_the_likely_name(served: Served, caplog):
    with caplog.at_level(logging.WARNING, "weft.server"):
        for _ in range(3):
            assert served.chat(max_tokens=1, temprature=0.5)
            assert served.generate(sampling={"max_new_tokens": 1, "new_line\n": 1, "min_new_token": 1})
    lines = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert len(lines) == 3
    assert "/v1/chat/completions" in lines[0]
    assert "temprature; did you mean temperature?" in lines[0]
    assert r"'sampling_params.new_line\n'" in lines[1]
    assert "sampling_params.min_new_token; did you mean min_new_tokens?" in lines[2]
    assert all("\n" not in line for line in lines)


def test_unknown_fields_of_a_large_body_are_logged_too(served: Served, caplog):
    with caplog.at_level(logging.WARNING, "weft.server"):
        assert served.chat(max_tokens=1, content="x" * 900, mispelled="y" * 20_000)
    assert "mispelled" in caplog.text
    assert "yyy" not in caplog.text


def test_a_client_cannot_grow_the_log_or_the_memory_with_names():
    seen = fields.UnknownFields()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    fields.log.addHandler(handler)
    try:
        for number in range(2000):
            data = json.dumps({"prompt": "x", **{f"{number}-{place}-" + "n" * 500: 1 for place in range(30)}}).encode()
            kind = KINDS["completion"]
            seen.note(fields.check_fields(data, "completion", kind, {}, strict=False), "completion", kind, {})
    finally:
        fields.log.removeHandler(handler)
    assert len(records) == fields.MAX_REMEMBERED + 1
    assert max(map(len, records)) < 300


def test_strict_fields_refuses_typos_and_names_what_was_meant(strict: Served):
    error = strict.chat(status=400, temprature=0.5)["error"]
    assert (error["param"], error["code"]) == ("temprature", None)
    assert error["message"] == "temprature is not a field of this route; did you mean temperature?"
    error = strict.post("/generate", {"text": "x", "sampling_params": {"top_pp": 1}}, 400)["error"]
    assert error["param"] == "sampling_params.top_pp"
    assert "did you mean top_p?" in error["message"]
    assert strict.chat(status=400, **{"a\nb" * 100: 1})["error"]["param"].startswith("'a\\nb")
    # Known ones pass, whatever they do; large bodies are read elsewhere by the same rules.
    assert strict.chat(max_tokens=1, user="me", typical_p=1.0, bad_words=None)
    assert strict.chat("x" * 20_000, status=400, temprature=0.5)["error"]["param"] == "temprature"


# what vLLM's users expect ---------------------------------------------------------------------------------------------


def test_bad_words_do_not_occur_wherever_they_would(served: Served):
    plain = served.ids(max_tokens=24)
    clean = served.ids(max_tokens=24, bad_words=[plain[4:7]])
    assert clean[:6] == plain[:6]
    assert clean[6] != plain[6]
    # As words too: alone, and after a space.
    biased = {"logit_bias": {str(ord("a")): 90, str(ord(" ")): 80}, "max_tokens": 4}
    assert served.say(**biased, bad_words=["aa"]) == "a a "
    assert served.say(**biased, bad_words=["a"]) == "    "
    assert served.say(**biased, bad_words=["aa", "a a"]) == "a  a"
    answer = served.post(
        "/v1/responses",
        {
            "input": "Hi",
            "bad_words": ["aa"],
            "temperature": 0,
            "max_output_tokens": 4,
            "logit_bias": biased["logit_bias"],
        },
    )
    assert answer["output"][0]["content"][0]["text"] == "a a "


def test_a_grammar_prevails_over_bad_words(served: Served):
    assert served.say(**saying("abc"), bad_words=["b"]) == "abc"


def test_only_allowed_tokens_are_sampled(served: Served):
    allowed = [ord(letter) for letter in "xyz"]
    found = served.ids(allowed_token_ids=allowed, temperature=3, seed=1, max_tokens=30)
    assert len(found) == 30
    assert set(found) == set(allowed)
    assert set(served.ids(allowed_token_ids=allowed, bad_words=["y"], temperature=3, seed=1, max_tokens=30)) == {
        ord("x"),
        ord("z"),
    }


def test_the_end_of_the_last_message_is_continued(served: Served):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is end"}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    found = served.post("/v1/chat/completions", {**body, "continue_final_message": True})
    prompt = bytes_of(found["prompt_token_ids"])
    assert prompt == "<|start|>user\nHi<|end|>\n<|start|>assistant\nThe answer is end"
    # The plain prompt has the same continuation.
    assert found["choices"][0]["token_ids"] == served.ids(found["prompt_token_ids"], max_tokens=3)
    parts = [messages[0], {"role": "assistant", "content": [{"type": "text", "text": "The answer is end"}]}]
    again = served.post("/v1/chat/completions", {**body, "messages": parts, "continue_final_message": True})
    assert again["prompt_token_ids"] == found["prompt_token_ids"]
    counted = served.post("/tokenize", {"messages": messages, "continue_final_message": True})
    assert counted["tokens"] == found["prompt_token_ids"]
    closed = served.post("/v1/chat/completions", {**body, "add_generation_prompt": False})
    assert bytes_of(closed["prompt_token_ids"]) == prompt + "<|end|>\n"
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    silent = {"role": "assistant", "content": None, "tool_calls": [called]}
    calling = {**body, "messages": [messages[0], silent], "continue_final_message": True}
    assert served.post("/v1/chat/completions", calling, 400)["error"]["param"] == "continue_final_message"


def bytes_of(tokens: list[int]) -> str:
    return tiny_model.tokenizer().decode(tokens, skip_special=False)


def test_the_end_of_a_long_prompt_is_kept(served: Served):
    text = "".join(chr(ord("a") + place % 26) for place in range(3000))
    found = served.complete(text, truncate_prompt_tokens=10, return_token_ids=True)["choices"][0]
    assert bytes(found["prompt_token_ids"]).decode() == text[-10:]
    assert found["token_ids"] == served.ids(text[-10:])
    short = served.complete("abc", truncate_prompt_tokens=10, return_token_ids=True)["choices"][0]
    assert bytes(short["prompt_token_ids"]) == b"abc"
    # -1: what the model can read, with room for the answer.
    most = served.complete(text, truncate_prompt_tokens=-1, max_tokens=48, return_token_ids=True)
    assert most["usage"]["total_tokens"] == 2048
    assert bytes(most["choices"][0]["prompt_token_ids"]).decode() == text[-2000:]
    assert served.complete(text, max_tokens=48, status=400)["error"]["code"] == "context_length_exceeded"
    cut = served.chat(text, truncate_prompt_tokens=12, return_token_ids=True)
    assert bytes_of(cut["prompt_token_ids"]).endswith("<|start|>assistant\n")
    assert len(cut["prompt_token_ids"]) == 12


def test_kept_tokens_shift_the_points_worth_keeping(served: Served):
    said = [
        {"type": "text", "text": "x" * 300, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "y" * 200},
    ]
    body = {"cache_salt": "cut", "truncate_prompt_tokens": 400, "max_tokens": 1}
    assert served.chat(said, **body)["usage"]["prompt_tokens"] == 400
    said[1]["text"] = "z" * 200
    again = served.chat(said, **body)
    # The declared point, 306 tokens into a prompt of 519, is at 187 of the 400 that are kept.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 128


def test_template_variables_are_any_json(served: Served):
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ style.tone }}{% for x in rows %}[{{ x }}]{% endfor %}"
    )
    with serving(template=template) as server:
        values = {"style": {"tone": "kind"}, "rows": [1, "b", None]}
        found = server.chat("Hi", max_tokens=1, return_token_ids=True, chat_template_kwargs=values)
        assert bytes_of(found["prompt_token_ids"]) == "Hikind[1][b][None]"


# scores of the prompt -------------------------------------------------------------------------------------------------


def native_scores(served: Served, ids: list[int], top: int, salt: str) -> tuple[list, list]:
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
    sampling = {"sampling_params": {"max_new_tokens": 0}, "cache_salt": salt}
    meta = served.post("/generate", {**body, **sampling})["meta_info"]
    return meta["input_token_logprobs"], meta["input_top_logprobs"]


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_prompt_logprobs_are_those_of_the_native_route_cached_or_not(served: Served, route):
    text, salt = "Once upon a time there was a fox. " * 6, f"scores {route}"
    ask = served.complete if route == "completion" else served.chat
    same = {"max_tokens": 2, "cache_salt": salt, "return_token_ids": True}
    for round_ in range(2):
        found = ask(text, **same, prompt_logprobs=3)
        home = found["choices"][0] if route == "completion" else found
        scores, ids = home["prompt_logprobs"], home["prompt_token_ids"]
        own, tops = native_scores(served, ids, 3, salt)
        assert scores[0] is None
        assert len(scores) == len(ids)
        for place in range(1, len(ids)):
            entry = scores[place]
            assert next(iter(entry)) == str(ids[place])
            assert entry[str(ids[place])]["logprob"] == pytest.approx(own[place][0], abs=1e-4)
            ranked = sorted((each["rank"], int(token)) for token, each in entry.items() if each["rank"] is not None)
            assert [token for _, token in ranked] == [token for _, token, _ in tops[place]]
            assert [rank for rank, _ in ranked] == [1, 2, 3]
        assert entry[str(ids[-1])]["decoded_token"] == bytes_of(ids[-1:])
        # The second round finds the prompt in the cache, and scores it all the same.
        assert (ask(text, **same)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) or not round_


def test_echo_and_prompt_logprobs_each_show_their_own_number(served: Served):
    text = "Once upon a time"
    both = served.complete(text, echo=True, logprobs=1, prompt_logprobs=4, max_tokens=2)["choices"][0]
    echoed = served.complete(text, echo=True, logprobs=1, max_tokens=2)["choices"][0]
    scored = served.complete(text, prompt_logprobs=4, max_tokens=2)["choices"][0]
    assert both["logprobs"] == echoed["logprobs"]
    assert both["prompt_logprobs"] == scored["prompt_logprobs"]
    assert "prompt_logprobs" not in echoed
    fewer = served.complete(text, echo=True, logprobs=4, prompt_logprobs=0, max_tokens=2)["choices"][0]
    assert [len(entry) for entry in fewer["prompt_logprobs"][1:]] == [1] * (len(text) - 1)
    only = served.complete(text, prompt_logprobs=0, max_tokens=2)["choices"][0]["prompt_logprobs"]
    assert [len(entry) for entry in only[1:]] == [1] * (len(text) - 1)
    assert [next(iter(entry.values()))["logprob"] for entry in only[1:]] == pytest.approx(
        both["logprobs"]["token_logprobs"][1 : len(text)], abs=1e-4
    )


def test_several_answers_to_a_prompt_have_the_scores_of_one(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Only the first answer scores its prompt, which a cached prompt cannot; each choice shows the scores."""
    asked: list[int | None] = []
    follow = FollowedAnswer.__init__

    def followed(self, request, *others):
        asked.append(request.params.prompt_logprobs)
        follow(self, request, *others)

    monkeypatch.setattr(FollowedAnswer, "__init__", followed)
    prompts = ["Once upon a time", "there was"]
    found = served.complete(prompts, prompt_logprobs=2, n=3, max_tokens=2, seed=1)["choices"]
    assert asked == [2, None, None] * 2
    for place, choice in enumerate(found):
        assert choice["index"] == place
        alone = served.complete(prompts[place // 3], prompt_logprobs=2, max_tokens=1)["choices"][0]
        assert choice["prompt_logprobs"] == found[place // 3 * 3]["prompt_logprobs"]
        assert list(map(set, choice["prompt_logprobs"][1:])) == list(map(set, alone["prompt_logprobs"][1:]))
    chat = served.chat("Hello", prompt_logprobs=2, n=3, max_tokens=2)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    echoed = served.complete("Once upon a time", echo=True, logprobs=1, n=2, max_tokens=1)["choices"]
    assert echoed[0]["logprobs"]["token_logprobs"][:-1] == echoed[1]["logprobs"]["token_logprobs"][:-1]
    assert asked[-2:] == [1, None]
