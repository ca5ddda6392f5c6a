"""Sends sessions to a server, at a given rate or with bounded concurrency, and measures times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any

from weft.cli.bench.measures import MeasuredRequest
from weft.cli.bench.options import BenchOptions
from weft.cli.bench.workloads import BenchSession, BenchTurn, words
from weft.cli.client import Client, ServerError

PATHS = {"tokens": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}
Tell = Callable[[MeasuredRequest], None]


async def send_all(
    client: Client, model: str, sessions: Sequence[BenchSession], options: BenchOptions, tell: Tell
) -> tuple[list[MeasuredRequest], float]:
    """Return the results of all requests, and the time from the first arrival to the last chunk."""
    gate = asyncio.Semaphore(options.concurrency) if options.concurrency else nullcontext()
    outcomes: list[MeasuredRequest] = []
    started = time.perf_counter()

    async def one(session: BenchSession) -> None:
        async with gate:
            async for outcome in converse(client, model, session, options):
                outcomes.append(outcome)
                tell(outcome)

    async with asyncio.TaskGroup() as tasks:
        async for session in arrivals(sessions, options):
            tasks.create_task(one(session))
    return outcomes, time.perf_counter() - started


async def arrivals(
    sessions: Sequence[BenchSession],
    options: BenchOptions,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[BenchSession]:
    """Yield every session when it is due; a delayed session does not delay the ones after it."""
    started = now()
    for session, due in zip(sessions, due_times(sessions, options)):
        await sleep(max(0.0, started + due - now()))
        yield session


def due_times(sessions: Sequence[BenchSession], options: BenchOptions) -> Iterator[float]:
    """Yield start times in seconds: Poisson arrivals at the given rate, the trace's clock, or all at once."""
    chance, due = random.Random(options.seed), 0.0
    for session in sessions:
        if options.request_rate:
            due += chance.expovariate(options.request_rate)
        elif session.due is not None:
            due = session.due
        yield due


async def converse(
    client: Client, model: str, session: BenchSession, options: BenchOptions
) -> AsyncIterator[MeasuredRequest]:
    """Yield the results of a session's turns; a failure ends the session, because later turns build on it."""
    said: list[dict[str, str]] = []
    for turn in session.turns:
        outcome = await ask(client, PATHS[options.shape], body_of(model, said, turn, options))
        yield outcome
        if outcome.error is not None:
            return
        said += [{"role": "user", "content": words(turn.drawn)}, {"role": "assistant", "content": outcome.text}]


def body_of(model: str, said: list[dict[str, str]], turn: BenchTurn, options: BenchOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": turn.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.shape == "tokens":
        body["prompt"] = list(turn.drawn)
    elif options.shape == "text":
        body["prompt"] = "\n".join([*(each["content"] for each in said), words(turn.drawn)])
    else:
        body["messages"] = [*said, {"role": "user", "content": words(turn.drawn)}]
    return body


async def ask(client: Client, path: str, body: dict[str, Any]) -> MeasuredRequest:
    outcome = MeasuredRequest(sent=time.perf_counter())
    try:
        async with aclosing(client.stream(path, body)) as events:
            async for event in events:
                _take(outcome, event, time.perf_counter())
        if not outcome.chunks:
            outcome.error = "the response has no choices"
    except ServerError as error:
        outcome.error = str(error)
    outcome.ended = outcome.chunks[-1] if outcome.chunks else time.perf_counter()
    outcome.tokens = outcome.tokens or len(outcome.chunks)
    return outcome


def _take(outcome: MeasuredRequest, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or ():
        spoken = choice.get("delta", {}) if "delta" in choice else {"content": choice.get("text")}
        text = spoken.get("content") or spoken.get("reasoning_content") or ""
        # The first chunk of a chat may contain only the role, and the last one only the finish reason.
        silent = "role" in spoken or (choice.get("finish_reason") and outcome.chunks)
        if text or not silent:
            outcome.chunks.append(now)
            outcome.text += text
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens, outcome.tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details")
        if details is not None:
            outcome.cached_tokens = details.get("cached_tokens") or 0
