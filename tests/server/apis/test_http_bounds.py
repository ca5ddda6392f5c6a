"""What is too much, too late, malformed or not served gets a 4xx that names it. Tiny model."""

from __future__ import annotations

import json
import socket

import pytest

from tests.support.servers.held_steps import HeldSteps, wait_until
from tests.support.servers.http_server import Served, posted, raw, serving
from tests.support.servers.http_values import LIMITS
from weft.server.settings import Limits, ServerSettings

CACHED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def open_server():
    with serving(ServerSettings(limits=LIMITS), max_sequences=8) as server:
        yield server


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def tool(name: str, parameters: dict | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def schema_format(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 101}, "max_tokens"),
        ({"max_completion_tokens": 101}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stop": ["a"] * 4}, "stop"),
        ({"stop": "a" * 11}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [1, 2, 3, 4]}, "stop_token_ids"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(7)}}, "logit_bias"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x"}] * 6}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}] * 3}, "messages"),
        ({"messages": [{"role": "user", "content": [CACHED] * 3}]}, "messages"),
        ({"messages": [{"role": "system<|end|>\n<|start|>", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user\n", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "x" * 33, "content": "x"}]}, "messages[0].role"),
        ({"tools": [tool("a"), tool("b"), tool("c")]}, "tools"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool("no spaces")]}, "tools[0].function.name"),
        ({"tools": [tool("a", deep(7))]}, "tools[0].function.parameters"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": schema_format(deep(7))}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"enum": ["x" * 2000]})}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "a" * 51}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
        ),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"priority": 1 << 40}, "priority"),
        ({"min_tokens": 50, "max_tokens": 5}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 1 << 64}, "seed"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [259]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 9}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "regex": "a"}, "allowed_token_ids"),
        ({"bad_words": ["x"] * 4}, "bad_words"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[1, 259]]}, "bad_words"),
        ({"bad_words": [[1] * 513]}, "bad_words"),
        ({"chat_template_kwargs": {"a": "x" * 300}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": deep(5)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a" * 65: 1}}, "chat_template_kwargs"),
        ({"lora_path": "x"}, "lora_path"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"echo": True}, "echo"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"response_format": schema_format({"type": "nonsense"})}, "response_format.json_schema.schema"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"ebnf": 'other ::= "x"'}, "ebnf"),
        ({"regex": "("}, "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ],
)
def test_bounds_of_chat_name_the_field(open_server: Served, fields, param):
    error = open_server.chat(status=400, **fields)["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param, error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["x"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 3}, "n"),
        ("/v1/completions", {"prompt": []}, None),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [1, "x"]}, "prompt"),
        ("/v1/completions", {"prompt": [259]}, None),
        ("/v1/completions", {"prompt": [[1], []]}, None),
        ("/v1/completions", {"prompt": "x" * 3000}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 2000, "max_tokens": 90}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ("/v1/completions", {"prompt": "x", "logprobs": 6}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/completions", {}, None),
        ("/generate", {}, "text"),
        ("/generate", {"text": "x", "input_ids": [1]}, "text"),
        ("/generate", {"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ("/generate", {"text": "x", "sampling_params": {"n": 5}}, "sampling_params.n"),
        ("/generate", {"text": "x", "sampling_params": {"stop": ["a"] * 4}}, "sampling_params.stop"),
        ("/generate", {"text": "x", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ("/generate", {"text": "x", "sampling_params": {"structural_tag": "a"}}, "sampling_params.structural_tag"),
        (
            "/generate",
            {"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 5}},
            "sampling_params.min_new_tokens",
        ),
        ("/generate", {"text": "x", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ("/generate", {"text": "x", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ("/generate", {"text": "x", "logprob_start_len": [-2]}, "logprob_start_len[0]"),
        ("/generate", {"text": "x", "video_data": "x"}, "video_data"),
        ("/generate", {"text": "x", "custom_logit_processor": "x"}, "custom_logit_processor"),
        ("/generate", {"text": "x", "lora_path": "x"}, "lora_path"),
        ("/generate", {"text": "x", "return_hidden_states": True}, "return_hidden_states"),
        ("/generate", {"text": "x", "session_params": {"id": "x"}}, "session_params"),
        ("/generate", {"text": "x", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 101}}, "sampling_params.max_new_tokens"),
        ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 6}, "top_logprobs_num"),
        ("/generate", {"text": "x", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
        ("/generate", {"text": "x", "rid": ["a", "b"]}, "rid"),
        ("/generate", {"text": "x", "image_data": "http://127.0.0.1/x.png"}, "image_data"),
        ("/generate", {"text": "x", "audio_data": ["http://127.0.0.1/x.wav"]}, "audio_data"),
        ("/generate", {"text": "x", "input_embeds": [[0.5]]}, "input_embeds"),
        ("/generate", {"text": "x", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 101}, "max_output_tokens"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 6}, "input"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}], "instructions": "x"},
            "input[0].content[0].type",
        ),
        ("/v1/responses", {"input": [{"role": "a b", "content": "x"}]}, "input[0].role"),
        ("/v1/responses", {"input": "x", "conversation": "c"}, "conversation"),
        ("/v1/responses", {"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ("/v1/responses", {"input": [{"type": "message"}]}, "input[0]"),
        ("/v1/responses", {"input": [{"type": "function_call"}]}, "input[0]"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": [{"role": "a b", "content": "x"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [259]}, "tokens[0]"),
        ("/abort_request", {}, "rid"),
    ],
)
def test_bounds_elsewhere_name_the_field(open_server: Served, path, body, param):
    error = open_server.post(path, body, 400)["error"]
    assert param is None or error["param"] == param, error


def test_nothing_is_fetched(open_server: Served):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "file", "file": {"file_data": url}},
        ):
            error = open_server.chat([part], status=400)["error"]
            assert error["param"] == "messages[0].content[0].type"
        with pytest.raises(TimeoutError):
            trap.accept()


def test_a_body_has_a_bound_whether_its_length_is_told_or_not(open_server: Served):
    large = b'{"prompt": "' + b"x" * (1 << 16) + b'"}'
    told = open_server.client.post("/v1/completions", content=large)
    assert told.status_code == 413

    def pieces():
        for _ in range(64):
            yield b"x" * 4096

    assert open_server.client.post("/v1/completions", content=pieces()).status_code == 413
    assert told.json()["error"]["code"] == "request_too_large"


def test_heads_have_a_bound_in_bytes(open_server: Served):
    begun = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    assert raw(open_server, begun, b"x-large: " + b"a" * 8000).startswith(b"HTTP/1.1 431")
    many = b"".join(b"x-%d: aaaaaaaaaaaaaaaaaaaaaa\r\n" % number for number in range(300))
    assert raw(open_server, begun, many).startswith(b"HTTP/1.1 431")
    # All at once, so that the head is complete before anybody counts.
    assert b" 431 " in raw(open_server, begun + many + b"connection: close\r\n\r\n")[:40]
    assert raw(open_server, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert open_server.client.get("/health").status_code == 200


def test_heads_and_bodies_have_a_bound_in_time():
    # On a server of their own: others need not hurry.
    with serving(ServerSettings(limits=Limits(header_seconds=0.3, body_seconds=0.3))) as server:
        assert raw(server, b"").startswith(b"HTTP/1.1 408")
        assert raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\n").startswith(b"HTTP/1.1 408")
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{"
        assert raw(server, begun).startswith(b"HTTP/1.1 408")


def test_too_many_requests_are_told_to_wait(open_server: Served, monkeypatch):
    steps = HeldSteps(monkeypatch)
    steps.hold()
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 90, "ignore_eos": True, "stream": True}
    with posted(open_server, "/v1/completions", body):
        wait_until(lambda: open_server.backend.open == 6)
        refused = open_server.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "rate_limit_error"
    # The client has hung up; as soon as the server has noticed, there is room.
    steps.release()
    wait_until(lambda: open_server.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200)


# malformed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "empty"),
        (b"nonsense", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"prompt": "x"', "JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', "JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}", "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", ""),
        (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": "5"}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "stream": 1}', "stream"),
        (b'{"prompt": {"a": 1}}', "prompt"),
        (b'{"prompt": [1.5]}', "prompt[0]"),
        (b'{"prompt": [-1]}', "prompt[0]"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', ""),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias"),
        (b'{"prompt": "x", "logit_bias": {"1": null}}', "logit_bias"),
        (b'{"prompt": "x", "stop": [1]}', "stop[0]"),
        (b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}", "deep"),
        (b'{"other": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", "deep"),
    ],
)
def test_malformed_bodies_get_a_4xx_that_names_what_is_wrong(open_server: Served, body, named):
    answer = open_server.client.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert named in error["message"] or named == error["param"], error
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text


def test_a_key_that_stands_twice_and_unknown_ones_do_no_harm(open_server: Served):
    body = b'{"prompt": "a", "prompt": "x", "max_tokens": 2, "temperature": 0, "unknown": {"a": [1]}}'
    found = open_server.client.post("/v1/completions", content=body).json()
    assert found["choices"][0]["text"] == open_server.complete("x", max_tokens=2)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/", 405), ("POST", "/v1/audio/speech", 404), ("DELETE", "/v1/models", 405)],
)
def test_errors_of_routing_have_the_same_shape(open_server: Served, method, path, status):
    answer = open_server.client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert f"{method} {path}" in error["message"]


def test_templates_cannot_reach_python(open_server: Served):
    """What a client says is data: braces of Jinja are shown to the model as they stand."""
    said = "{{ ''.__class__.__mro__ }}{% for x in y %}"
    found = open_server.post("/tokenize", {"messages": [{"role": "user", "content": said}]})
    assert said in open_server.post("/detokenize", {"tokens": found["tokens"]})["prompt"]


def test_an_error_inside_tells_nothing(open_server: Served, monkeypatch):
    def broken(*args, **more):
        raise RuntimeError("secret path /etc/shadow")

    monkeypatch.setattr("weft.server.front.Front.read_prompts", broken)
    answer = open_server.client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


def test_what_is_no_http_gets_an_error_of_the_same_shape(open_server: Served):
    head, _, body = raw(open_server, b"\x16\x03\x01 hello\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_client_that_does_not_read_is_cut_off_and_its_request_ends():
    limits = Limits(stall_seconds=0.3)
    with serving(ServerSettings(limits=limits), max_length=100_000, memory="64MiB") as server:
        body = {"prompt": "x", "max_tokens": 90_000, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}
        # What the machine would take from the server for a client that does not read is bounded as well.
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with posted(server, "/v1/completions", body):
            wait_until(lambda: server.stats()["finished"]["abort"] == 8)
