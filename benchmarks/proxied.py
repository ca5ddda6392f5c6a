"""What a router in front of a server costs over HTTP, on CPUs.

    python -m benchmarks.proxied                        an engine that answers at once: only the fronts take time
    python -m benchmarks.proxied --engine weft-small    `weft serve` with the built-in model, and `weft route`

A client sends the same requests to a server and to a router in front of it, alternating, so that the load of the
machine affects both alike. First token: one stream at a time, a prompt of 1,000 token ids; medians. Throughput: many
streams at once. A front's CPU time per token does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep

import uvloop

from benchmarks.http import ask, stopped
from benchmarks.instant import PROGRAM
from benchmarks.replicas import SECRET
from tests.support.models import tiny_model
from weft.backends.dispatcher import Dispatcher
from weft.base.options import Options
from weft.fleet.backend import FleetBackend
from weft.fleet.listener import FleetDoor, FleetListener
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.fleet.routing import RoutedChoice
from weft.server.app import create_app
from weft.server.http.listener import bind
from weft.server.settings import ServerSettings
from weft.start.launch import Server
from weft.start.process_backend import ProcessBackend
from weft.text.template import ChatTemplate

STARTING_SECONDS = 300.0
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT = [20 + place * 7 % 200 for place in range(1000)]


@dataclass(frozen=True)
class Front:
    """A running server. Its engine, if it has one, is a process of its own."""

    name: str
    pid: int
    port: int

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def started(name: str, arguments: list[str], log: Path) -> Iterator[Front]:
    """Start a command of `weft` and wait for its address."""
    command = [sys.executable, "-m", "weft", name, *arguments, "--port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = next(filter(None, (re.fullmatch(r"http://.*:(\d+)\n", line) for line in process.stdout)), None)
        assert found is not None, f"`{' '.join(command)}` did not start:\n{log.read_text()}"
        yield Front(name, process.pid, int(found[1]))
    finally:
        process.terminate()
        process.wait()


def door_of(log: Path) -> str:
    """Return the address at which a server serves routers, from its log."""
    until = perf_counter() + STARTING_SECONDS
    while perf_counter() < until:
        if found := re.search(r"serving routers at (\S+:\d+)", log.read_text()):
            return found[1]
        sleep(0.05)
    raise TimeoutError(f"no address for routers in the log:\n{log.read_text()}")


@contextmanager
def commands(threads: int) -> Iterator[list[Front]]:
    """Start `weft serve` with the built-in model, and `weft route` in front of it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        secret, serve_log = place / "secret", place / "serve.log"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        common = ["--fleet-secret", str(secret)]
        engine = ["--threads", str(threads), "--memory", "512MiB", "--max-length", "4096", "--draft", "off"]
        with started("serve", [*engine, "--fleet-listen", "127.0.0.1:0", *common], serve_log) as direct:
            address = f"tcp://{door_of(serve_log)}"
            with started("route", [address, *common], place / "route.log") as routed:
                yield [direct, routed]


async def serve_instant(pipe: Connection, replica: tuple[str, int] | None) -> None:
    """Serve an instant engine of its own, or one behind a replica's door, until the pipe says so."""
    listener, door = socket.create_server(("127.0.0.1", 0)), None
    backend: Dispatcher | FleetBackend = ProcessBackend(Options(model="0"), program=PROGRAM)
    if replica is not None:
        remote = RemoteBackend(ReplicaAddress(*replica), SECRET)
        backend = FleetBackend([("0", remote)], chooser=RoutedChoice())
    await backend.start()
    if isinstance(backend, ProcessBackend):
        door = FleetListener(listener, backend, FleetDoor("127.0.0.1", 0, SECRET))
    tokenizer, front = tiny_model.tokenizer(), bind("127.0.0.1", 0)
    template = ChatTemplate(tiny_model.TEMPLATE, tokenizer.specials)
    app = create_app(backend, tokenizer, template, frozenset(), ServerSettings())
    addresses = front.getsockname()[1], listener.getsockname()[:2]
    server = Server(app, ServerSettings(), stopped, lambda _: pipe.send(addresses))
    serving = asyncio.ensure_future(server.serve(sockets=[front]))
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    server.should_exit = True
    await serving
    if door is not None:
        await door.close()
    await backend.stop(0)


def run_instant(pipe: Connection, replica: tuple[str, int] | None) -> None:
    uvloop.run(serve_instant(pipe, replica))


@contextmanager
def instant() -> Iterator[list[Front]]:
    """Start both fronts with an engine that answers at once."""
    context, replica = multiprocessing.get_context("spawn"), None
    with ExitStack() as stack:
        fronts = []
        for name in ("serve", "route"):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_instant, args=(theirs, replica))
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, "stop")
            port, replica = ours.recv()
            fronts.append(Front(name, process.pid or 0, port))
        yield fronts


def first_token(front: Front) -> float:
    """Return the seconds from sending a request to the first event of its stream."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True})
    connection = HTTPConnection("127.0.0.1", front.port, timeout=STARTING_SECONDS)
    connection.connect()
    began = perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while not response.readline().startswith(b"data: {"):
        pass
    seconds = perf_counter() - began
    response.read()
    connection.close()
    return seconds


def first_tokens(fronts: list[Front], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {front.name: [] for front in fronts}
    for place in range(repeats):
        for front in fronts if place % 2 else fronts[::-1]:
            times[front.name].append(first_token(front))
    return times


def show_first_tokens(fronts: list[Front], repeats: int) -> None:
    before = {front.name: front.cpu_seconds() for front in fronts}
    times = first_tokens(fronts, repeats)
    # The server's front also passes on what the router asks, so its own requests are not all that it works for.
    cpu = {front.name: (front.cpu_seconds() - before[front.name]) / repeats for front in fronts}
    direct = statistics.median(times["serve"])
    for name, found in times.items():
        median, high = statistics.median(found), sorted(found)[int(0.9 * len(found))]
        print(f"{name}: first token {1e3 * median:.2f} ms ({1e3 * (median - direct):+.2f}), p90 {1e3 * high:.2f} ms")
        print(f"{name}: {1e3 * cpu[name]:.2f} ms of the front's CPU time per request")


def throughput(front: Front, streams: int, tokens: int) -> tuple[float, float]:
    """Return tokens per second, and microseconds of the front's CPU time per token."""
    before = front.cpu_seconds()
    found = asyncio.run(ask(front.port, "/v1/completions", streams, tokens, True))
    return streams * tokens / found.seconds, 1e6 * (front.cpu_seconds() - before) / (streams * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--engine", default="instant", choices=("instant", "weft-small"))
    parser.add_argument("--threads", type=int, default=1, help="threads of the built-in model")
    args = parser.parse_args()
    with instant() if args.engine == "instant" else commands(args.threads) as fronts:
        first_tokens(fronts, 5)
        show_first_tokens(fronts, args.repeats)
        rates: dict[str, list[tuple[float, float]]] = {front.name: [] for front in fronts}
        for _ in range(args.rounds):
            for front in fronts:
                rates[front.name].append(throughput(front, args.streams, args.answer))
        for name, each in rates.items():
            speed, cpu = (statistics.median(values) for values in zip(*each, strict=True))
            print(
                f"{name}: {speed:.0f} tokens/s with {args.streams} streams, {cpu:.0f} us of the front's CPU per token"
            )


if __name__ == "__main__":
    main()
