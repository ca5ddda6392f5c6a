"""Large client text is read in other processes, bounded in number, time, memory and waiting. No torch, no clock."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.servers.backends import in_loop
from tests.support.servers.fake_text_worker import PROGRAM
from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.http_server import Served, posted, serving
from weft.base.errors import EngineStopped, RequestError
from weft.server import front as front_module
from weft.server.settings import Limits, ServerSettings
from weft.server.texts.body_reader import SMALL_BYTES
from weft.server.texts.messages import setup_of
from weft.server.texts.pool import ENDED, TextPool
from weft.server.texts.prompt_builder import PromptFacts

FACTS = PromptFacts("tiny", 259, 2048, 2048)
LIMITS = Limits(waiting_bytes=1000, text_memory_bytes=2 << 30)
HELLO = {"role": "user", "content": "Hello"}


class Deadlines:
    """Deadlines that pass when a test says so. Each job has one, in their order."""

    def __init__(self) -> None:
        self.set: list[asyncio.Timeout] = []

    def __call__(self, seconds: float) -> asyncio.Timeout:
        assert seconds == LIMITS.text_seconds
        self.set.append(asyncio.timeout(None))
        return self.set[-1]

    def passes(self, number: int) -> None:
        self.set[number].reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def made(size: int = 1, deadlines: Deadlines | None = None):
    setup = setup_of(None, None, LIMITS, False, 30)
    pool = TextPool(lambda: setup, LIMITS, size=size, program=PROGRAM, timeout=deadlines or Deadlines())
    try:
        yield pool
    finally:
        pool.stop()


def ask(pool: TextPool, body: bytes) -> asyncio.Task[bytes]:
    return asyncio.ensure_future(pool.run("act", FACTS, body))


async def until(condition) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


@in_loop
async def test_work_is_done_in_another_process_which_stays():
    async with made() as pool:
        assert pool.process_ids == []
        assert await ask(pool, b"x" * 500) == b"x" * 500
        [process] = pool.process_ids
        assert process != os.getpid()
        await pool.start()
        assert [await ask(pool, b"y"), await ask(pool, b"z"), pool.process_ids] == [b"y", b"z", [process]]


@in_loop
async def test_a_worker_is_ended_at_its_deadline_and_others_go_on():
    deadlines = Deadlines()
    async with made(2, deadlines) as pool:
        hanging = ask(pool, b"hang")
        await until(lambda: deadlines.set)
        [process] = pool.process_ids
        assert await ask(pool, b"x") == b"x"
        deadlines.passes(0)
        with pytest.raises(RequestError, match="took more than 30 seconds") as raised:
            await hanging
        assert raised.value.status == 503
        await until(lambda: not Path(f"/proc/{process}").exists())
        assert process not in pool.process_ids
        assert await asyncio.gather(ask(pool, b"y"), ask(pool, b"z")) == [b"y", b"z"]


@in_loop
async def test_a_worker_ends_with_its_client_and_one_that_waits_never_begins():
    deadlines = Deadlines()
    async with made(1, deadlines) as pool:
        hanging = ask(pool, b"hang")
        await until(lambda: deadlines.set)
        [process] = pool.process_ids
        waiting, last = ask(pool, b"hang"), ask(pool, b"x")
        await asyncio.sleep(0)
        waiting.cancel()
        hanging.cancel()
        assert await last == b"x"
        assert len(deadlines.set) == 2
        assert process not in pool.process_ids
        assert pool.held_bytes == 0


@in_loop
async def test_waiting_has_a_bound_in_bytes():
    deadlines = Deadlines()
    async with made(1, deadlines) as pool:
        hanging = ask(pool, b"hang")
        waiting = ask(pool, b"x" * 900)
        await until(lambda: deadlines.set)
        with pytest.raises(RequestError, match="busy") as raised:
            await ask(pool, b"y" * 100)
        assert raised.value.status == 503
        hanging.cancel()
        assert await waiting == b"x" * 900
        assert await ask(pool, b"y" * 100) == b"y" * 100


@in_loop
async def test_a_worker_that_dies_or_takes_too_much_memory_harms_no_other():
    async with made() as pool:
        with pytest.raises(RequestError, match=ENDED):
            await ask(pool, b"die")
        with pytest.raises(RequestError, match=f"more than {LIMITS.text_memory_bytes} bytes of memory") as raised:
            await ask(pool, b"memory")
        assert raised.value.status == 413
        assert await ask(pool, b"x") == b"x"


@in_loop
async def test_a_pool_that_was_stopped_takes_nothing_more():
    async with made() as pool:
        hanging = ask(pool, b"hang")
        await until(lambda: pool.process_ids)
        pool.stop()
        with pytest.raises(RequestError, match=ENDED):
            await hanging
        with pytest.raises(EngineStopped):
            await ask(pool, b"x")


def test_a_worker_loads_no_torch():
    code = "import sys, weft.server.text_process; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


# behind HTTP ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with serving(max_length=32768, memory="64MiB") as found:
        yield found


def large(body: dict) -> dict:
    """Return the same body, large by a field that no route knows."""
    return body | {"unknown": "x" * SMALL_BYTES}


def same(answer):
    """Return an answer without what differs between two equal requests."""
    if isinstance(answer, dict):
        names = ("id", "created", "created_at", "usage", "meta_info", "call_id")
        return {name: same(value) for name, value in answer.items() if name not in names}
    return [same(each) for each in answer] if isinstance(answer, list) else answer


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": ["Once", [1, 2]], "n": 2, "logit_bias": {"7": 3}, "stop": "x", "seed": 1}),
        ("/v1/chat/completions", {"messages": [HELLO], "tools": [TOOL], "tool_choice": "required", "max_tokens": 99}),
        ("/v1/chat/completions", {"messages": [HELLO | EPHEMERAL, HELLO], "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": [HELLO], "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {"messages": [HELLO], "bad_words": ["a", [1, 2]], "prompt_logprobs": 1}),
        ("/v1/chat/completions", {"messages": [HELLO | EPHEMERAL, HELLO], "truncate_prompt_tokens": 9}),
        ("/v1/responses", {"input": "Hello", "instructions": "Be kind.", "metadata": {"a": "b"}}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}),
        ("/generate", {"input_ids": [[1, 2]], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}),
        ("/generate", {"input_ids": [1, 2], "return_logprob": True, "sampling_params": {"temperature": 0}}),
        ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
        ("/tokenize", {"messages": [HELLO], "tools": [TOOL]}),
        ("/detokenize", {"tokens": [72, 105, 257]}),
    ],
)
def test_a_large_body_gets_the_same_answer_from_another_process(server: Served, path, body):
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"temperature": 0, most: 8} | body if path.startswith("/v1") else body
    here = server.post(path, body)
    assert len(json.dumps(body)) < SMALL_BYTES
    there = server.post(path, large(body))
    assert same(there) == same(here)
    assert server.pool.process_ids


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [HELLO], "documents": [{}]}, 400, "documents"),
        ("/v1/responses", {"input": [{"role": "a b", "content": "x"}]}, 400, "input[0].role"),
        ("/generate", {}, 400, "text"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [259]}, 400, "tokens[0]"),
    ],
)
def test_a_large_body_gets_the_same_error_from_another_process(server: Served, path, body, status, param):
    here, there = server.post(path, body, status), server.post(path, large(body), status)
    assert there == here
    assert there["error"]["param"] == param


def test_what_stands_beside_prompts_in_a_large_body_has_a_bound(server: Served):
    body = {"prompt": "x", "logit_bias": {str(number): 1 for number in range(60_000)}}
    assert "besides its prompts" in server.complete(status=413, **body)["error"]["message"]


def test_text_above_the_threshold_is_read_elsewhere_and_below_it_here(server: Served, monkeypatch):
    """No tokenizer of this process sees a long text; one that breaks here shows who reads a short one."""
    monkeypatch.setattr(front_module.PromptBuilder, "encode", None)
    assert server.complete(**large({"prompt": "short"}))["usage"]["prompt_tokens"] == 5
    server.complete("short", 500)


def test_grammars_are_translated_elsewhere_if_they_are_long(server: Served, monkeypatch):
    def broken(grammar):
        raise AssertionError("translated here")

    monkeypatch.setattr(front_module, "with_source", broken)
    monkeypatch.setattr("weft.text.grammar_source.source_of", broken)
    choices = [f"answer {number}" for number in range(200)]
    assert server.say(structured_outputs={"choice": choices}, max_tokens=20) in choices
    wrong = {"structured_outputs": {"grammar": "start: (" + " " * 3000}}
    assert server.chat(status=400, **wrong)["error"]["param"] == "structured_outputs.grammar"


def test_tokenizing_is_bounded_like_prompts_before_anything_is_tokenized(monkeypatch):
    with serving(ServerSettings(limits=Limits(open_sequences=1)), max_length=64) as server:
        assert server.post("/tokenize", {"prompt": "x" * 64})["count"] == 64
        for path, body, param in (
            ("/tokenize", {"prompt": "x" * 65}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "x" * 65}]}, "messages"),
            ("/detokenize", {"tokens": [1] * 65}, "tokens"),
        ):
            error = server.post(path, body, 400)["error"]
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        monkeypatch.setattr("weft.text.tokenizer.Tokenizer.encode_all", None)
        monkeypatch.setattr("weft.text.tokenizer.Tokenizer.decode", None)
        longest = max(map(len, ("<|start|>", "<|end|>", "<|pad|>")))
        error = server.post("/tokenize", {"prompt": "x" * (64 * longest + 1)}, 400)["error"]
        assert error["code"] == "context_length_exceeded"
        assert server.post("/detokenize", {"tokens": [1] * 65}, 400)["error"]["param"] == "tokens"


def test_tokenizing_counts_as_an_open_request_and_ends_with_its_client():
    limits = Limits(open_sequences=1, text_seconds=10 * SECONDS)
    with serving(ServerSettings(limits=limits), pool={"size": 1, "program": PROGRAM}) as server:
        hang = asyncio.run_coroutine_threadsafe(server.pool.run("act", FACTS, b"hang"), server.loop)
        wait_until(lambda: server.pool.process_ids != [])
        for path, body in (("/tokenize", {"prompt": "x" * 20_000}), ("/detokenize", {"tokens": [1] * 20_000})):
            # The worker is taken, so these wait.
            with posted(server, path, body):
                wait_until(lambda: server.client.post("/tokenize", json={"prompt": "x"}).status_code == 429)
            wait_until(lambda: server.client.post("/tokenize", json={"prompt": "x"}).status_code == 200)
        hang.cancel()
