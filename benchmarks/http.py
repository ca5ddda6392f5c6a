"""Measure the cost of serving without the model: `python -m benchmarks.http`.

The engine answers at once, either in the server's process or in its own, and the client only counts chunks. What
remains is HTTP, JSON, detokenizing and metrics. Server and client are separate processes. Wall time depends on the load
of the machine; the server's CPU time per token does not.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.instant import INFO, PROGRAM
from tests.support.models import tiny_model
from tests.support.servers.fake_engines import InstantEngine
from weft.backends.dispatcher import Dispatcher
from weft.base.options import Options
from weft.engine.protocol import Command, End, Replies, Submit
from weft.server.app import create_app
from weft.server.http.listener import bind
from weft.server.settings import ServerSettings
from weft.start.launch import Server
from weft.start.process_backend import ProcessBackend
from weft.text.template import ChatTemplate

PROMPT = "x" * 40


class LockstepBackend(Dispatcher):
    """An instant engine in the event loop: one token for every open request, then a turn for all streams.

    Tokens never accumulate, so every token becomes its own chunk. This is the most expensive way to stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.info = INFO
        self._engine = InstantEngine()
        self._numbers_of: dict[int, int] = {}
        self._sequences: dict[int, int] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._closed = None

    async def stop(self, drain_seconds: float) -> None:
        self._close("stopped")

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            sequence = self._engine.add(command.request)
            self._numbers_of[sequence], self._sequences[command.number] = command.number, sequence
            asyncio.get_running_loop().call_soon(self._receive, Replies(accepted=[command.number]))
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.ensure_future(self._step())
        elif isinstance(command, End):
            self._engine.abort(self._sequences[command.number])

    async def _step(self) -> None:
        while not self._engine.idle:
            for output in self._engine.step():
                output.sequence = self._numbers_of[output.sequence]
                stream = self._streams.get(output.sequence)
                if stream is not None:
                    if output.finish is not None:
                        stream.end(None)
                        self._forget(output.sequence)
                    stream.push(output)
            # The first pass of the loop wakes the streams; the second lets them send and wait again.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


# Seconds per step of the engine process. `instant` produces more than a server can stream and competes with it for a
# core; `paced` produces about the goal.
STEP_SECONDS = {"instant": 0.0, "paced": 0.01}


def make_backend(kind: str) -> Dispatcher:
    if kind == "lockstep":
        return LockstepBackend()
    return ProcessBackend(Options(model=str(STEP_SECONDS[kind])), program=PROGRAM)


async def serve(make: Callable[[], Dispatcher], pipe: Connection, limit: int) -> None:
    backend = make()
    await backend.start()
    tokenizer = tiny_model.tokenizer()
    settings = ServerSettings(api_keys=("secret",), admin_key="admin")
    settings = replace(settings, limits=replace(settings.limits, open_sequences=limit))
    app = create_app(backend, tokenizer, ChatTemplate(tiny_model.TEMPLATE, tokenizer.specials), frozenset(), settings)
    listener = bind("127.0.0.1", 0)
    server = Server(app, settings, stopped, lambda address: pipe.send(listener.getsockname()[1]))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    loop = asyncio.get_running_loop()
    # The client asks for the CPU time so far, and finally sends "stop".
    while await loop.run_in_executor(None, pipe.recv) == "time":
        pipe.send(time.process_time())
    server.should_exit = True
    await serving
    await backend.stop(0)


async def stopped() -> None:
    """Do nothing: no request runs when the client sends "stop"."""


def run_server(make: Callable[[], Dispatcher], pipe: Connection, limit: int, profile: str | None) -> None:
    profiler = cProfile.Profile(time.thread_time) if profile else None
    if profiler:
        profiler.enable()
    import uvloop

    uvloop.run(serve(make, pipe, limit))
    if profiler and profile:
        profiler.disable()
        with open(profile, "w") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(40)


class Reader(asyncio.Protocol):
    """Sends one request and counts the events of its answer."""

    def __init__(self, request: bytes, end: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._end = end
        self._done = done
        self._tail = b""
        self.chunks = 0
        self.first_seconds: float | None = None

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter()
        self.chunks += data.count(b"data: {")
        self._tail = self._tail[-512:] + data[-512:]
        if self._end in self._tail and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        with suppress(asyncio.InvalidStateError):
            self._done.set_exception(ConnectionError("the server closed the connection"))


def request_bytes(port: int, path: str, tokens: int, stream: bool) -> bytes:
    body: dict[str, Any] = {"max_tokens": tokens, "stream": stream, "ignore_eos": True}
    if path == "/v1/completions":
        body["prompt"] = PROMPT
    else:
        body["messages"] = [{"role": "user", "content": PROMPT}]
    if stream:
        body["stream_options"] = {"include_usage": True}
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer secret\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


@dataclass(frozen=True)
class Measured:
    seconds: float
    chunks: int


async def ask(port: int, path: str, streams: int, tokens: int, stream: bool) -> Measured:
    loop = asyncio.get_running_loop()
    request, end = request_bytes(port, path, tokens, stream), b"data: [DONE]" if stream else b'"usage"'
    readers, waits = [], []
    began = time.perf_counter()
    for _ in range(streams):
        done = loop.create_future()
        make = partial(Reader, request, end, done)
        readers.append(await loop.create_connection(make, "127.0.0.1", port))
        waits.append(done)
    await asyncio.gather(*waits)
    seconds = time.perf_counter() - began
    for transport, _ in readers:
        transport.abort()
    return Measured(seconds, sum(reader.chunks for _, reader in readers))


def measure(kind: str, path: str, streams: int, tokens: int, profile: str | None) -> dict[str, float]:
    import uvloop

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=run_server, args=(partial(make_backend, kind), theirs, streams + 8, profile), daemon=False
    )
    process.start()
    port = ours.recv()

    def spent() -> float:
        ours.send("time")
        return float(ours.recv())

    def timed(count: int, stream: bool) -> tuple[Measured, float]:
        before = spent()
        found = uvloop.run(ask(port, path, streams, count, stream))
        return found, spent() - before

    timed(16, True)
    short, long, plain = timed(1, True), timed(tokens + 1, True), timed(1, False)
    ours.send("stop")
    process.join(30)
    total = streams * (tokens + 1)
    return {
        "tokens_per_second": total / long[0].seconds,
        "tokens_per_chunk": total / max(1, long[0].chunks - streams),  # the last chunk of each stream is its usage
        "server_us_per_token": (long[1] - short[1]) / (streams * tokens) * 1e6,
        "server_us_per_stream": short[1] / streams * 1e6,
        "server_us_per_request": plain[1] / streams * 1e6,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.http", description=__doc__)
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per stream")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the best one is printed")
    parser.add_argument("--profile", metavar="FILE", help="profile one lockstep round of the server into this file")
    asked = parser.parse_args(arguments)
    print(f"{os.cpu_count()} cores, {asked.streams} streams of {asked.tokens} tokens, best of {asked.rounds}")
    for path in ("/v1/completions", "/v1/chat/completions"):
        for kind in ("lockstep", "paced", "instant"):
            profile = asked.profile if kind == "lockstep" and path == "/v1/completions" else None
            rounds = [measure(kind, path, asked.streams, asked.tokens, None) for _ in range(asked.rounds)]
            if profile:
                measure(kind, path, asked.streams, asked.tokens, profile)
            best = max(rounds, key=lambda found: found["tokens_per_second"])
            print(f"{path:24} {kind:9}", "  ".join(f"{name} {value:,.1f}" for name, value in best.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
