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
    measured: list[MeasuredRequest] = []
    started = time.perf_counter()

    async def one(session: BenchSession) -> None:
        async with gate:
            async for request in converse(client, model, session, options):
                measured.append(request)
                tell(request)

    async with asyncio.TaskGroup() as tasks:
        async for session in arrivals(sessions, options):
            tasks.create_task(one(session))
    return measured, time.perf_counter() - started


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
        request = await ask(client, PATHS[options.shape], body_of(model, said, turn, options))
        yield request
        if request.error is not None:
            return
        said += [{"role": "user", "content": words(turn.drawn)}, {"role": "assistant", "content": request.text}]


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
    request = MeasuredRequest(sent=time.perf_counter())
    try:
        async with aclosing(client.stream(path, body)) as events:
            async for event in events:
                _take(request, event, time.perf_counter())
        if not request.chunks:
            request.error = "the response has no choices"
    except ServerError as error:
        request.error = str(error)
    request.ended = request.chunks[-1] if request.chunks else time.perf_counter()
    request.tokens = request.tokens or len(request.chunks)
    return request


def _take(request: MeasuredRequest, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or ():
        spoken = choice.get("delta", {}) if "delta" in choice else {"content": choice.get("text")}
        text = spoken.get("content") or spoken.get("reasoning_content") or ""
        # The first chunk of a chat may contain only the role, and the last one only the finish reason.
        silent = "role" in spoken or (choice.get("finish_reason") and request.chunks)
        if text or not silent:
            request.chunks.append(now)
            request.text += text
    usage = event.get("usage")
    if usage:
        request.prompt_tokens, request.tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details")
        if details is not None:
            request.cached_tokens = details.get("cached_tokens") or 0
        answer = usage.get("completion_tokens_details") or {}
        request.draft_steps = answer.get("draft_steps") or 0
        request.accepted_drafts = answer.get("accepted_draft_tokens") or 0
