"""Engines behind a thread or a process, driven in a loop: started, asked, and what they answer alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps

import numpy as np
import pytest

from tests.support.clocks import Ticks
from tests.support.models import tiny_model
from tests.support.servers import ticking_engine
from tests.support.servers.fake_engines import PROGRAM, load_instant
from tests.support.servers.held_steps import SECONDS
from weft.backends.dispatcher import Dispatcher
from weft.backends.output_stream import OutputStream
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.engine.events import Output, Report
from weft.engine.request import Request
from weft.start.engine_process import load_engine
from weft.start.process_backend import ProcessBackend
from weft.start.thread_backend import ThreadBackend

SMALL = Options(**tiny_model.OPTIONS, memory="16MiB", max_length=512, max_sequences=4, threads=1)
LONG = 100_000


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: object, **named: object) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **named), 2 * SECONDS)

        asyncio.run(bounded())

    return run


def instant(kind: str, step_seconds: float = 0.0, **settings: object) -> Dispatcher:
    options = Options(model=str(step_seconds))
    if kind == "thread":
        return ThreadBackend(lambda: load_instant(options, False), **settings)
    return ProcessBackend(options, program=PROGRAM, **settings)


def real(kind: str, options: Options = SMALL) -> Dispatcher:
    if kind == "thread":
        return ThreadBackend.from_options(options, progress=False, now=Ticks())
    return ProcessBackend(options, progress=False, program=ticking_engine.PROGRAM)


@asynccontextmanager
async def started(backend: Dispatcher) -> AsyncIterator[Dispatcher]:
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop(0)


def ask(prompt: list[int], count: int, **more: object) -> Request:
    return Request(np.array(prompt, np.int32), SamplingParams(max_tokens=count, temperature=0.0), **more)


async def collect(stream: OutputStream) -> tuple[list[Output], Report | None]:
    outputs = [output async for batch in stream for output in batch]
    for output in outputs:
        output.sequence = 0
    return outputs, stream.report


async def tokens_of(backend: Dispatcher, request: Request) -> list[int]:
    return [output.token for output in (await collect(await backend.submit(request)))[0]]


both = pytest.mark.parametrize("kind", ["thread", "process"])


def varied_requests() -> list[Request]:
    random = np.random.default_rng(5)
    stem = random.integers(0, 255, 150).astype(np.int32)
    wishes = [
        SamplingParams(max_tokens=5, temperature=0.0),
        SamplingParams(max_tokens=6, seed=3, logprobs=2, top_k=40, repetition_penalty=1.3),
        SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2, logit_bias={7: 100.0}),
        SamplingParams(max_tokens=0),
        SamplingParams(max_tokens=6, temperature=0.0, bad_words=((7,), (3, 4)), allowed_token_ids=(3, 4, 7, 200)),
    ]
    requests = [Request(stem, wish) for wish in wishes]
    requests.append(Request(stem, wishes[0], salt=b"somebody else"))
    requests.append(Request(stem, wishes[0], stop_tokens=frozenset(range(0, 256, 2)), snapshots=(70,)))
    return requests


def alone(requests: list[Request]) -> list[tuple[list[Output], Report]]:
    """What an engine says to one after the other, without anything around it."""
    engine, _ = load_engine(SMALL, progress=False, now=Ticks())
    answers = []
    for request in requests:
        number, outputs = engine.add(request), []
        while not engine.idle:
            outputs += engine.step()
        for output in outputs:
            output.sequence = 0
        answers.append((outputs, engine.report(number)))
    return answers
