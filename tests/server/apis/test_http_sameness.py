"""Under load every answer is the one that a quiet server gives, and clients that go away leave nothing behind.

The tiny model in a thread, memory for a fraction of what is asked at once, audits after every step.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.servers.held_steps import HeldSteps, wait_until
from tests.support.servers.http_server import Served, posted, serving

CLIENTS = 24
STEMS = ["In the beginning was the word, and the word was long. " * 4, "Call me Ishmael. Some years ago, " * 5]
# Where two tokens are closer than this, rounding may choose; prompts of whose answers that is true are not asked.
CLEAR = 1e-3


@dataclass
class Ask:
    """A request, and its answer from a quiet server."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    finish: str = ""


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Greedy and seeded ones, that share beginnings of different lengths."""
    draw = random.Random(seed)
    found = []
    for place in range(count):
        stem = STEMS[place % 2][: draw.choice([70, 130, 1000])]
        prompt = stem + "".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(4, 60)))
        body = {"prompt": prompt, "max_tokens": draw.choice([4, 8, 16]), "ignore_eos": draw.random() < 0.5}
        # Few candidates, so that few random numbers lie where rounding could matter.
        chosen = {"temperature": 0} if draw.random() < 0.6 else {"temperature": 1, "seed": place, "top_k": 4}
        found.append({**body, **chosen, "return_token_ids": True})
    return found


def quiet_answers(server: Served, count: int, seed: int) -> list[Ask]:
    """Requests whose answers are clear, each asked alone, with nothing cached."""
    asks = []
    for body in bodies(2 * count, seed):
        choice = server.post("/v1/completions", {**body, "logprobs": 2, "cache_salt": str(len(asks))})["choices"][0]
        tops = [sorted(top.values(), reverse=True)[:2] for top in choice["logprobs"]["top_logprobs"]]
        if body["temperature"] or all(len(top) < 2 or top[0] - top[1] > CLEAR for top in tops):
            asks.append(Ask(body, choice["token_ids"], choice["finish_reason"]))
        if len(asks) == count:
            break
    server.post("/flush_cache", None)
    return asks


async def load(server: Served, asks: list[Ask], seed: int) -> dict[str, int]:
    """All at once; some stream, some hang up in the middle, some are aborted by name."""
    draw = random.Random(seed)
    happened = dict.fromkeys(("whole", "streamed", "left", "aborted"), 0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:

        async def one(ask: Ask, way: str) -> None:
            await asyncio.sleep(draw.random() * 0.3)
            if way == "whole":
                choice = (await client.post("/v1/completions", json=ask.body)).json()["choices"][0]
                assert (choice["token_ids"], choice["finish_reason"]) == (ask.tokens, ask.finish), ask.body
            elif way == "streamed":
                tokens, finish = await stream(client, ask.body)
                assert (tokens, finish) == (ask.tokens, ask.finish), ask.body
            elif way == "left":
                await stream(client, ask.body, leave=draw.randrange(3))
            else:
                await abort(client, ask.body)
            happened[way] += 1

        ways = draw.choices(list(happened), [5, 5, 3, 2], k=len(asks))
        await asyncio.gather(*(one(*each) for each in zip(asks, ways)))
    return happened


async def stream(client: httpx.AsyncClient, body: dict[str, Any], leave: int | None = None) -> tuple[list[int], str]:
    tokens, finish = [], ""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        events = 0
        async for line in answer.aiter_lines():
            if leave is not None and events >= leave:
                break
            if line.startswith("data: {"):
                choice = httpx.Response(200, content=line[6:]).json()["choices"][0]
                tokens += choice["token_ids"]
                finish = choice["finish_reason"] or finish
                events += 1
    return tokens, finish


async def abort(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.aiter_lines()
        name = httpx.Response(200, content=(await anext(lines))[6:]).json()["id"]
        await client.post("/abort_request", json={"rid": name})
        rest = [line async for line in lines if line.startswith("data: {")]
        ends = [httpx.Response(200, content=line[6:]).json()["choices"][0]["finish_reason"] for line in rest]
        assert not ends or ends[-1] in ("abort", "stop", "length")


def is_quiet(server: Served) -> bool:
    stats = server.stats()
    return not stats["leases"] and not stats["running"] and not stats["waiting"]


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_answers_under_load_are_those_of_a_quiet_server(depth):
    with serving(
        memory="6MiB", max_length=512, max_sequences=12, max_tokens_per_step=96, depth=depth, paranoid=True
    ) as server:
        asks = quiet_answers(server, CLIENTS, seed=depth)
        assert len(asks) == CLIENTS
        happened = asyncio.run(load(server, asks, seed=depth))
        assert min(happened.values()) > 0, happened
        wait_until(lambda: is_quiet(server))
        stats = server.stats()
        assert stats["cached_tokens"] > 0
        for kind, uses in stats["units"].items():
            assert uses["live"] == 0, kind
        assert server.post("/flush_cache", None)["cached_tokens"] == 0
        stats = server.stats()
        assert (stats["cells"], stats["slabs_used"]) == (0, 0)
        facts = server.client.get("/server_info").json()
        assert facts["open_sequences"] == 0
        page = server.client.get("/metrics").text
        assert "weft_requests_open 0.0" in page


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_client_that_hangs_up_frees_memory_within_a_step(monkeypatch, streams, depth):
    steps = HeldSteps(monkeypatch)
    body = {"prompt": "x" * 70, "max_tokens": 1800, "ignore_eos": True, "stream": streams, "n": 2}
    with serving(max_sequences=4, depth=depth) as server:
        with posted(server, "/v1/completions", body):
            wait_until(lambda: steps.engine is not None and len(steps.engine.ledger.leases) == 2)
            steps.hold()
            steps.wait_held()
            engine, planned = steps.engine, steps.engine.planner.number
            assert len(engine.ledger.leases) == 2
        # The client leaves in the middle of a step, and the news is there before that has ended.
        wait_until(lambda: len(server.backend._inbox._commands) >= 2)
        steps.release()
        wait_until(lambda: not engine.ledger.leases)
        # That step was the last one that knew of it.
        assert engine.planner.number - planned <= 1
        assert server.stats()["finished"]["abort"] == 2


def test_when_the_engine_stops_everybody_gets_an_error_and_health_is_red():
    with serving(max_sequences=4, max_length=32768, memory="64MiB") as server:
        # They cannot be complete before the engine stops.
        body = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True}
        answers: dict[bool, httpx.Response] = {}

        def ask(streams: bool) -> None:
            answers[streams] = server.client.post("/v1/completions", json={**body, "stream": streams})

        threads = [threading.Thread(target=ask, args=(streams,)) for streams in (True, False)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.stats()["running"] == 2)
        server.on_loop(lambda: server.backend.stop(0.05))
        for thread in threads:
            thread.join()
        assert answers[False].status_code == 503
        assert '"service_unavailable"' in answers[True].text
        assert answers[True].text.endswith("data: [DONE]\n\n")
        assert server.client.get("/health").status_code == 503
        assert server.client.post("/v1/completions", json=body).status_code == 503
        assert "weft_engine_up 0.0" in server.client.get("/metrics").text


def test_small_memory_bounds_answers_that_ask_for_no_length():
    with serving(memory="2MiB", max_sequences=2, max_length=100_000) as server:
        choice = server.chat(max_tokens=None, logit_bias={"65": 100}, stop="A" * 64)["choices"][0]
        assert choice["finish_reason"] == "stop"
