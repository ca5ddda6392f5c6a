"""Compare serving over HTTP with the same engine in process, both with the defaults of a user.

    python -m benchmarks.over_http lfm2-1.2b
    python -m benchmarks.over_http lfm2-1.2b --prefix-length 2048 --output-length 128 --column draft=off

Sends the same prompts, greedy and with answers of fixed length, to an engine in a process and to `weft serve` with
one client process and with several, alternating. If several clients are faster than one, the client is the limit.
CPU seconds of the front, the engine process and the clients say which of them is busy: one near the wall time is. The
number of steps and the time in them say whether the engine waited, or ran more or slower steps than alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from benchmarks.columns import options_of

STARTING_SECONDS = 300
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.over_http", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "model", nargs="?", default="lfm2-1.2b", help="name of a packaged configuration, or config.json"
    )
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--input-length", type=int, default=128)
    parser.add_argument("--output-length", type=int, default=512)
    parser.add_argument("--prefix-length", type=int, default=0, help="tokens that the prompts of a group share")
    parser.add_argument("--groups", type=int, default=8, help="number of different prefixes")
    parser.add_argument("--column", default="default", help="options of both engines, such as draft=off")
    parser.add_argument(
        "--clients", type=int, nargs="*", default=[1, 4], help="client processes that share the streams"
    )
    parser.add_argument("--vocabulary", type=int, default=8000, help="clients draw token ids below this number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", default="30GiB", help="memory of each engine for pages and states")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--serve-option", action="append", default=[], help="further option of `weft serve`")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(arguments, Path(folder))
        engine = start_engine()
        try:
            compare(server, engine, arguments)
        finally:
            for process in (server, engine):
                process.send_signal(signal.SIGTERM)
                process.kill() if process is engine else process.wait(30)
    return 0


def compare(server: subprocess.Popen[bytes], engine: subprocess.Popen[str], arguments: argparse.Namespace) -> None:
    wait_for_server(server, arguments)
    front, engine_process = server.pid, engine_of(server.pid)
    ask_engine(engine)  # loads, and measures a first round that compiles what is left
    for clients in arguments.clients:
        over_http(clients, arguments, -1)
    found: dict[str, list[float]] = {}
    for round_ in range(arguments.rounds):
        alone = ask_engine(engine)
        found.setdefault("in process", []).append(alone["rate"])
        print(f"  in process: {alone['rate']:,.0f} tokens/s, {alone['steps']:.0f} steps in {alone['seconds']:.3f} s")
        for clients in arguments.clients:

            def counters() -> list[float]:
                return [cpu_seconds(front), cpu_seconds(engine_process), *steps_of(arguments.port)]

            before = counters()
            rate, wall, client_cpu = over_http(clients, arguments, round_)
            front_cpu, engine_cpu, steps, step_seconds = (now - was for now, was in zip(counters(), before))
            name = f"{clients} client" + "s" * (clients > 1)
            found.setdefault(name, []).append(rate)
            print(
                f"  {name}: {rate:,.0f} tokens/s in {wall:.3f} s, {steps:.0f} steps in {step_seconds:.3f} s; "
                f"CPU seconds: front {front_cpu:.2f}, engine {engine_cpu:.2f}, busiest client {client_cpu:.2f}",
                flush=True,
            )
    base = statistics.median(found["in process"])
    for name, rates in found.items():
        median, each = statistics.median(rates), ", ".join(f"{rate:,.0f}" for rate in rates)
        print(f"{name:12} {median:>8,.0f} tokens/s   {median / base:.3f} of the engine alone   ({each})")


# over HTTP ------------------------------------------------------------------------------------------------------------


def start_server(arguments: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    options = ["--weights", "dummy", "--device", arguments.device, "--dtype", arguments.dtype]
    options += ["--memory", arguments.memory, "--port", str(arguments.port), "--max-sequences", "256"]
    options += [part for name, value in options_of(arguments.column).items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "weft", "serve", arguments.model, *options, *arguments.serve_option]
    with (folder / "server.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def wait_for_server(server: subprocess.Popen[bytes], arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{arguments.port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server is not ready after {STARTING_SECONDS} s")


def over_http(clients: int, arguments: argparse.Namespace, round_: int) -> tuple[float, float, float]:
    """Return tokens per second, the wall time, and the CPU seconds of the busiest client."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(clients), context.Queue()
    share = arguments.streams // clients
    processes = [
        context.Process(target=send, args=(arguments, share, f"{round_} {number}", barrier, results))
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=STARTING_SECONDS) for _ in processes]
    for process in processes:
        process.join()
    if errors := [each["errors"] for each in found if each["errors"]]:
        raise SystemExit(f"requests failed: {errors[0]}")
    wall = max(each["ended"] for each in found) - min(each["began"] for each in found)
    return sum(each["tokens"] for each in found) / wall, wall, max(each["cpu"] for each in found)


def send(arguments: argparse.Namespace, streams: int, seed: str, barrier: Barrier, results: Any) -> None:
    from weft.cli.bench.options import BenchOptions
    from weft.cli.bench.workloads import BenchSession, BenchTurn, draw

    options = BenchOptions(url=f"http://127.0.0.1:{arguments.port}", prompts=streams, progress=False)
    sessions = []
    for number in range(streams):
        # The same prefixes in every round, with other questions.
        prefix = draw(f"prefix {number % arguments.groups}", arguments.prefix_length, arguments.vocabulary)
        question = draw(f"{seed} question {number}", arguments.input_length, arguments.vocabulary)
        sessions.append(BenchSession((BenchTurn(prefix + question, arguments.output_length),)))
    results.put(asyncio.run(measure(sessions, options, barrier)))


async def measure(sessions: list[Any], options: Any, barrier: Barrier) -> dict[str, Any]:
    """Send all requests at once. Time nothing else: imports, the model's name and statistics are not serving."""
    from weft.cli.bench.load import send_all
    from weft.cli.client import Client

    client = Client(options.url)
    try:
        model = (await client.get("/v1/models"))["data"][0]["id"]
        barrier.wait()
        began, cpu = time.monotonic(), time.process_time()
        requests, _ = await send_all(client, model, sessions, options, lambda request: None)
        measured = {"began": began, "ended": time.monotonic(), "cpu": time.process_time() - cpu}
    finally:
        await client.close()
    errors = [request.error for request in requests if request.error is not None]
    return measured | {"errors": errors, "tokens": sum(request.tokens for request in requests)}


def steps_of(port: int) -> tuple[float, float]:
    """Return the number of steps since the start, and the seconds in them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return float(values["weft_steps_total"]), float(values["weft_step_seconds_total"])


# in process -----------------------------------------------------------------------------------------------------------


def start_engine() -> subprocess.Popen[str]:
    # -P: do not search the folder of this file, whose names (http.py) would hide Python's own modules.
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--worker"]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )


def ask_engine(engine: subprocess.Popen[str]) -> dict[str, float]:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write("go\n")
    engine.stdin.flush()
    line = engine.stdout.readline()
    if not line:
        raise SystemExit(f"the engine's process ended with code {engine.wait()}; its error is above")
    found: dict[str, float] = json.loads(line)
    return found


def work(arguments: argparse.Namespace) -> int:
    """Load the model, then measure once for every line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import numpy as np

    from benchmarks.gpu import Ask, fresh, play, random_prompt, start, warm_up

    longest = max(4096, arguments.prefix_length + arguments.input_length + arguments.output_length)
    options = options_of(arguments.column)
    llm = start(arguments.model, arguments, depth=1, max_sequences=256, max_length=longest, **options)
    prefixes = [random_prompt(llm, arguments.prefix_length, 1, group) for group in range(arguments.groups)]
    warm_up(llm, rows=(1, arguments.streams))
    engine = fresh(llm)
    for round_, _ in enumerate(sys.stdin):
        questions = [random_prompt(llm, arguments.input_length, 2, round_, n) for n in range(arguments.streams)]
        prompts = [np.concatenate([prefixes[n % len(prefixes)], each]) for n, each in enumerate(questions)]
        asks = [Ask(prompt, arguments.output_length) for prompt in prompts]
        before = engine.stats()["steps"]
        seconds = play(engine, asks)
        rate = arguments.streams * arguments.output_length / seconds
        found = {"rate": rate, "seconds": seconds, "steps": engine.stats()["steps"] - before}
        print(json.dumps(found), file=answers, flush=True)
    return 0


# processes ------------------------------------------------------------------------------------------------------------


def engine_of(front: int) -> int:
    """Return the number of the front's engine process: the child with the most CPU time."""
    return max(children(front), key=cpu_seconds)


def children(parent: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        found += [int(each) for each in path.read_text().split()]
    return found


def cpu_seconds(process: int) -> float:
    """Return the CPU time of all threads of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    sys.exit(main())
