"""An engine that hangs without dying is noticed: health turns red, requests are refused, and it may be started anew."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress

import pytest

from tests.support.servers.backends import ask, collect, in_loop, instant, started
from tests.support.servers.fake_engines import InstantEngine, fake_info
from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.serving import Served, serving
from weft.backends.dispatcher import Dispatcher
from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped
from weft.engine.events import Output
from weft.engine.protocol import Command, Question, Topic
from weft.engine.request import Request
from weft.start.thread_backend import ThreadBackend

# Of a front whose engine must not count as ill while the machine is busy with something else.
PATIENCE = 1.0


async def until(condition) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def ill(backend: Dispatcher) -> bool:
    return not backend.healthy


async def submitted(backend: Dispatcher, request: Request) -> OutputStream:
    """Submit a request as soon as the engine counts as healthy: on a busy machine it may be late by itself."""
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(EngineStopped):
                return await backend.submit(request)
            await asyncio.sleep(0.01)


async def answers(backend: Dispatcher) -> None:
    """Until the engine has answered a request; one that is started anew meanwhile gets it once more."""
    async with asyncio.timeout(SECONDS):
        while True:
            stream = await submitted(backend, ask([5], 2))
            with suppress(EngineStopped):
                outputs, _ = await collect(stream)
                assert [output.token for output in outputs] == [6, 7]
                return


class Stuck(InstantEngine):
    """Its steps wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def step(self) -> list[Output]:
        assert self.go.wait(SECONDS)
        return super().step()


@in_loop
async def test_a_hanging_engine_is_ill_until_it_is_heard_again():
    async with started(instant("process", 0.001, patience_seconds=PATIENCE)) as backend:
        stream = await submitted(backend, ask([1], 100_000))
        os.kill(backend.process_id, signal.SIGSTOP)
        await until(lambda: ill(backend))
        with pytest.raises(EngineStopped, match="does not respond"):
            await backend.submit(ask([1], 1))
        os.kill(backend.process_id, signal.SIGCONT)
        await until(lambda: backend.healthy)
        await answers(backend)
        backend.abort(stream)
        await collect(stream)


@pytest.mark.thorough
@in_loop
async def test_a_hanging_engine_is_started_anew_if_wished():
    async with started(instant("process", 0.001, patience_seconds=PATIENCE, restart=True)) as backend:
        stream = await submitted(backend, ask([1], 100_000))
        hanging = backend.process_id
        os.kill(hanging, signal.SIGSTOP)
        with pytest.raises(EngineStopped):
            await collect(stream)
        await until(lambda: backend.healthy)
        assert backend.process_id != hanging
        await answers(backend)


@in_loop
async def test_a_step_in_a_thread_that_takes_too_long_is_noticed_too():
    engine = Stuck()
    async with started(ThreadBackend(lambda: (engine, fake_info()), patience_seconds=0.2)) as backend:
        stream = await backend.submit(ask([1], 1))
        await until(lambda: ill(backend))
        engine.go.set()
        await collect(stream)
        await until(lambda: backend.healthy)


@in_loop
async def test_an_idle_or_busy_engine_gives_signs_of_life():
    async with started(instant("process", 0.02, patience_seconds=PATIENCE)) as backend:
        stream = await submitted(backend, ask([1], 100_000))
        await heard(backend)
        backend.abort(stream)
        await collect(stream)
        await heard(backend)
        await until(lambda: backend.healthy)


async def heard(backend: Dispatcher) -> None:
    """Until the backend has asked for a sign of life and got it."""
    asked: asyncio.Queue[int] = asyncio.Queue()
    before = backend._send

    def send(command: Command) -> None:
        if isinstance(command, Question) and command.topic is Topic.PULSE:
            asked.put_nowait(command.number)
        before(command)

    backend._send = send
    number = await asked.get()
    await until(lambda: number not in backend._asking)
    backend._send = before


@in_loop
async def test_without_a_bound_any_silence_is_well():
    engine = Stuck()
    async with started(ThreadBackend(lambda: (engine, fake_info()))) as backend:
        stream = await backend.submit(ask([1], 1))
        assert backend._watching is None
        assert backend.healthy
        engine.go.set()
        await collect(stream)


def health(served: Served) -> int:
    return served.call("/health")[0]


@pytest.mark.thorough
def test_health_tells_of_a_hanging_engine():
    with serving("--engine-timeout", "2") as served:
        wait_until(lambda: health(served) == 200)
        [engine] = served.children
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: health(served) == 503)
        assert served.call("/v1/completions", {"prompt": "x"})[0] == 503
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: health(served) == 200)
        wait_until(lambda: served.call("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200)
        assert served.stop() == 0
        assert "not responded" in served.errors.read_text()
