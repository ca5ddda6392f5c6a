"""What replicas gain and what routing costs, on CPUs: `python -m benchmarks.replicas`.

Throughput: the built-in model on one replica of one core, and on two of one core each. First token: an engine that
answers at once, reached directly, through a fleet of one member, and through a fleet over TCP; alternating, so that the
load of the machine affects all alike. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

import numpy as np

from benchmarks.instant import PROGRAM
from weft.backends.backend import Backend
from weft.base.cores import core_numbers
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.listener import FleetDoor, FleetListener
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.fleet.routing import RoutedChoice
from weft.start.process_backend import ProcessBackend

SECRET = b"only for measurements on this machine"


@asynccontextmanager
async def running(backend: Backend) -> AsyncIterator[Backend]:
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop(0)


def random_request(place: int, prompt: int, answer: int, vocabulary: int = 256) -> Request:
    tokens = np.random.default_rng(place).integers(20, vocabulary, prompt).astype(np.int32)
    return Request(tokens, SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True))


async def answered(backend: Backend, request: Request) -> int:
    count = 0
    async for outputs in await backend.submit(request):
        count += sum(output.token is not None for output in outputs)
    return count


async def throughput(cores: list[int], requests: int, prompt: int, answer: int) -> float:
    """Return tokens per second of a fleet with one replica on each of these cores."""
    options = Options(threads=1, memory="512MiB", max_length=4096, draft="off")
    members = [ProcessBackend(options, progress=False, cores=[core]) for core in cores]
    named = [(str(place), member) for place, member in enumerate(members)]
    async with running(FleetBackend(named, chooser=RoutedChoice())) as fleet:
        await asyncio.gather(*(answered(fleet, random_request(1000 + place, 32, 4)) for place in range(len(cores))))
        began = perf_counter()
        counts = await asyncio.gather(
            *(answered(fleet, random_request(place, prompt, answer)) for place in range(requests))
        )
        return sum(counts) / (perf_counter() - began)


async def first_token(backend: Backend, request: Request) -> float:
    began = perf_counter()
    stream = await backend.submit(request)
    await anext(stream)
    seconds = perf_counter() - began
    async for _ in stream:
        pass
    return seconds


async def first_tokens(repeats: int, prompt: int) -> dict[str, float]:
    """Return the median seconds to the first token, by the way to the engine."""
    direct, listener = ProcessBackend(Options(model="0"), program=PROGRAM), socket.create_server(("127.0.0.1", 0))
    async with running(direct):
        door = FleetListener(listener, direct, FleetDoor("127.0.0.1", 0, SECRET))
        remote = RemoteBackend(ReplicaAddress(*listener.getsockname()[:2]), SECRET)
        one = ProcessBackend(Options(model="0"), program=PROGRAM)
        fleets = (
            FleetBackend([("0", one)], chooser=RoutedChoice()),
            FleetBackend([("0", remote)], chooser=RoutedChoice()),
        )
        async with running(fleets[0]) as local, running(fleets[1]) as over_tcp:
            ways = {"direct": direct, "fleet": local, "fleet over TCP": over_tcp}
            times: dict[str, list[float]] = {name: [] for name in ways}
            for place in range(repeats):
                for name, backend in ways.items():
                    times[name].append(await first_token(backend, random_request(place, prompt, 2)))
        await door.close()
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--only", choices=("throughput", "first-token"))
    asked = parser.parse_args()
    if asked.only != "throughput":
        found = asyncio.run(first_tokens(asked.repeats, 1000))
        for name, seconds in found.items():
            added = "" if name == "direct" else f", {1e3 * (seconds - found['direct']):+.3f} ms"
            print(f"first token, {name}: {1e3 * seconds:.3f} ms{added}", flush=True)
    if asked.only != "first-token":
        cores = core_numbers()[:2]
        rates = [asyncio.run(throughput(cores[:n], asked.requests, asked.prompt, asked.answer)) for n in (1, 2)]
        print(f"one replica: {rates[0]:.0f} tokens/s; two: {rates[1]:.0f} tokens/s, {rates[1] / rates[0]:.2f} times")


if __name__ == "__main__":
    main()
