"""An engine that hangs without dying is noticed: health turns red, requests are refused, and it may be started anew."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from tests.serving import Served, serving
from tests.test_backends import ask, collect, in_loop, instant, started, tokens_of
from weft.base.errors import EngineStopped
from weft.server.desk import Desk


async def until(condition, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def ill(backend: Desk) -> bool:
    return not backend.healthy


@in_loop
async def test_a_hanging_engine_is_ill_until_it_is_heard_again():
    async with started(instant("process", 0.001, patience_seconds=0.3)) as backend:
        stream = await backend.submit(ask([1], 100_000))
        os.kill(backend.process_id, signal.SIGSTOP)
        await until(lambda: ill(backend))
        with pytest.raises(EngineStopped, match="no sign of life"):
            await backend.submit(ask([1], 1))
        os.kill(backend.process_id, signal.SIGCONT)
        await until(lambda: backend.healthy)
        assert await tokens_of(backend, ask([5], 2)) == [6, 7]
        backend.abort(stream)
        await collect(stream)


@in_loop
async def test_a_hanging_engine_is_started_anew_if_wished():
    async with started(instant("process", 0.001, patience_seconds=0.3, restart=True)) as backend:
        stream = await backend.submit(ask([1], 100_000))
        hanging = backend.process_id
        os.kill(hanging, signal.SIGSTOP)
        with pytest.raises(EngineStopped):
            await collect(stream)
        await until(lambda: backend.healthy)
        assert backend.process_id != hanging
        assert await tokens_of(backend, ask([5], 2)) == [6, 7]


@in_loop
async def test_a_step_in_a_thread_that_takes_too_long_is_noticed_too():
    async with started(instant("thread", 1.0, patience_seconds=0.2)) as backend:
        stream = await backend.submit(ask([1], 1))
        await until(lambda: ill(backend))
        await collect(stream)
        await until(lambda: backend.healthy)


@in_loop
async def test_an_idle_or_busy_engine_is_well_and_without_a_bound_any_is():
    async with started(instant("process", 0.02, patience_seconds=3.0)) as backend:
        stream = await backend.submit(ask([1], 100_000))
        for _ in range(50):
            assert backend.healthy
            await asyncio.sleep(0.02)
        backend.abort(stream)
        await collect(stream)
        await asyncio.sleep(2.0)
        assert backend.healthy
    async with started(instant("thread", 0.5)) as backend:
        stream = await backend.submit(ask([1], 1))
        await asyncio.sleep(0.3)
        assert backend.healthy
        await collect(stream)


def health(served: Served) -> int:
    return served.call("/health")[0]


def test_health_tells_of_a_hanging_engine():
    with serving("--engine-timeout", "0.5") as served:
        assert health(served) == 200
        [engine] = served.children
        os.kill(engine, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while health(served) == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert health(served) == 503
        assert served.call("/v1/completions", {"prompt": "x"})[0] == 503
        os.kill(engine, signal.SIGCONT)
        while health(served) != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert served.call("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        assert served.stop() == 0
        assert "no sign of life" in served.errors.read_text()
