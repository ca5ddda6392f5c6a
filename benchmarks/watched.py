"""Measure what it costs that a page looks on: `python -m benchmarks.watched`.

A whole server streams answers to 256 clients. In every second round a page is open: it listens to `/debug/events` and
asks for `/cache/outline` and `/server_info` every two seconds. The device is a clock: a step takes ten milliseconds,
less than a model's with as many rows. With `--step-ms 0` it returns at once, so that all time is Weft's own. Prints the
ratios of neighbouring rounds: tokens a second, and processor time of the server's two processes for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import msgspec
import numpy as np

from benchmarks.http import Reader, request_bytes, run_server
from benchmarks.instant import INFO
from benchmarks.planner import SPEC
from weft.backends.backend import ModelInfo
from weft.base.config import EngineConfig
from weft.base.options import Options
from weft.base.plan import Landing, Plan
from weft.engine.device import Device
from weft.engine.loop import Engine
from weft.start.engine_process import main as run_engine
from weft.start.process_backend import ProcessBackend

# Without this folder on the path, where Python would find an `http`.
PROGRAM = (sys.executable, "-P", str(Path(__file__).resolve()))
STREAMS, ANSWER = 256, 3000
# As the page does.
POLLED, PAUSE_SECONDS = ("/cache/outline", "/server_info"), 2.0
HEADERS = {"authorization": "Bearer admin"}
# Before the numbers of a round count.
SETTLE_SECONDS = 1.0


class Letters(Device):
    """Device whose steps take equal times, one after the other, and return random letters."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._random = np.random.default_rng(5)
        self._ready = 0.0

    def launch(self, plan: Plan) -> tuple[float, int]:
        self._ready = max(self._ready, time.perf_counter()) + self._step_seconds
        return self._ready, plan.sample_count

    def land(self, flight: tuple[float, int]) -> Landing:
        ready, count = flight
        time.sleep(max(0.0, ready - time.perf_counter()))
        return Landing(self._random.integers(97, 123, count).astype(np.int32), None, None)


def load(options: Options, progress: bool) -> tuple[Engine, ModelInfo]:
    """Return an engine. `options.model` is the number of seconds per step."""
    most, length = 8192, ANSWER + 96
    config = EngineConfig(
        memory_bytes=8 << 30, max_sequences=STREAMS, max_tokens_per_step=most, max_length=length, depth=1
    )
    settings = {"exact": False, "draft": "off", "cache": True, "max_tokens_per_step": most}
    return Engine(SPEC, Letters(float(options.model)), config), msgspec.structs.replace(
        INFO, max_length=length, settings=settings
    )


# what is measured -----------------------------------------------------------------------------------------------------


def processor_seconds(server: int) -> float:
    """Return the processor time of a server and of its engine."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    fields = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in (server, *children)]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


class Round:
    """What the server has done at some moments of a round."""

    def __init__(self, client: httpx.AsyncClient, server: int) -> None:
        self._client = client
        self._server = server

    async def measure(self, seconds: float) -> tuple[float, float]:
        """Return tokens a second, and microseconds of processor time for each, over some seconds."""
        loop = asyncio.get_running_loop()
        began, tokens, spent = loop.time(), await self._tokens(), processor_seconds(self._server)
        await asyncio.sleep(seconds)
        made = await self._tokens() - tokens
        return made / (loop.time() - began), 1e6 * (processor_seconds(self._server) - spent) / made

    async def _tokens(self) -> int:
        return int((await self._client.get("/server_info")).json()["stats"]["tokens_out"])


async def stream(port: int) -> None:
    """Ask for one answer after the other."""
    request = request_bytes(port, "/v1/completions", ANSWER, True)
    while True:
        done = asyncio.get_running_loop().create_future()
        made = partial(Reader, request, b"data: [DONE]", done)
        transport, _ = await asyncio.get_running_loop().create_connection(made, "127.0.0.1", port)
        try:
            await done
        finally:
            transport.abort()


async def look_on(client: httpx.AsyncClient) -> None:
    """Ask what an open page asks, more than one view of it does."""

    async def listen() -> None:
        async with client.stream("GET", "/debug/events", timeout=None) as answer:
            async for _ in answer.aiter_raw():
                pass

    async def poll(path: str) -> None:
        while True:
            (await client.get(path)).raise_for_status()
            await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(listen(), *map(poll, POLLED))


async def play(port: int, server: int, pairs: int, seconds: float) -> list[tuple[float, float]]:
    """Return the ratios of pairs of rounds, with an open page by without."""
    streams = [asyncio.ensure_future(stream(port)) for _ in range(STREAMS)]
    ratios = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=60) as client:
        await asyncio.sleep(3 * SETTLE_SECONDS)
        for pair in range(pairs):
            found = {}
            for looks in (True, False) if pair % 2 else (False, True):
                page = asyncio.ensure_future(look_on(client)) if looks else None
                await asyncio.sleep(SETTLE_SECONDS)
                found[looks] = await Round(client, server).measure(seconds)
                if page is not None:
                    assert not page.done(), page.exception()
                    page.cancel()
                    with suppress(asyncio.CancelledError):
                        await page
            (rate, spent), (rate_alone, spent_alone) = found[True], found[False]
            ratios.append((rate / rate_alone, spent / spent_alone))
            print(
                f"{rate_alone:>9,.0f} alone, {rate:>9,.0f} watched: {ratios[-1][0]:.4f};"
                f" processor {spent_alone:.2f} and {spent:.2f} us a token: {ratios[-1][1]:.4f}",
                flush=True,
            )
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each round")
    parser.add_argument("--step-ms", type=float, default=10.0)
    asked = parser.parse_args()
    import uvloop

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_server,
        args=(partial(ProcessBackend, Options(model=str(asked.step_ms / 1e3)), program=PROGRAM), theirs, 512, None),
    )
    process.start()
    assert process.pid is not None
    ratios = uvloop.run(play(ours.recv(), process.pid, asked.pairs, asked.seconds))
    ours.send("stop")
    process.join(30)
    for name, values in zip(("tokens a second", "processor time a token"), zip(*ratios, strict=True), strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name}: median {middle:.4f}, half of the pairs from {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        run_engine(load)
    else:
        main()
