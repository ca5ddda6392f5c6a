"""Prefill and decode engines in processes of their own: the answers of one engine, also when either is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import numpy as np
import pytest

from tests.support.models import tiny_model
from tests.support.servers.backends import alone, collect, in_loop, started, varied_requests
from tests.support.transfer.processes import RESTART_SECONDS, SECRET, transfers_when_all_have_ended
from weft.backends.backend import ModelInfo
from weft.base.errors import EngineStopped, OptionError, RequestError
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.base.transfers import TransferSettings
from weft.cli.main import main
from weft.cli.serve import ServeOptions
from weft.engine.request import Request
from weft.fleet import member
from weft.fleet.backend import FleetBackend
from weft.fleet.choosing import LeastOpen
from weft.fleet.listener import FleetDoor, FleetListener
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.server.metrics.registry import EngineCollector
from weft.start import process_backend
from weft.start.process_backend import ProcessBackend

SMALL = Options(**tiny_model.OPTIONS, memory="16MiB", max_length=512, max_sequences=4, threads=1)
# The number of requests that the slow fuzz sends, and what it draws from: several may run side by side.
REQUESTS = int(os.environ.get("WEFT_DISAGGREGATED_REQUESTS", "1000"))
SEED = int(os.environ.get("WEFT_DISAGGREGATED_SEED", "1"))
# The share of them during which a process is killed. A restart takes as long as dozens of requests.
KILLED = 0.01


def backend_of(role: str, way: str = "tcp", **more: object) -> ProcessBackend:
    settings = TransferSettings(role, SECRET, arrivals="16MiB", way=way)
    return ProcessBackend(SMALL, progress=False, transfer=settings, **more)


def fleet_of(prefillers: int = 1, decoders: int = 1, way: str = "tcp", **more: object) -> FleetBackend:
    members = [(f"p{i}", backend_of("prefill", way, **more)) for i in range(prefillers)]
    members += [(f"d{i}", backend_of("decode", way, **more)) for i in range(decoders)]
    # Every prompt of more than two cells goes over a prefill engine.
    return FleetBackend(members, chooser=LeastOpen(), check_seconds=0.05)


def needing_nixl(way: str) -> str:
    if way == "nixl":
        pytest.importorskip("nixl")
    return way


# Units that must be pulled would not arrive in another way.
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["tcp", "nixl"])
def test_answers_over_two_processes_are_those_of_one_engine(way):
    asyncio.run(compare_with_one_engine(needing_nixl(way)))


async def compare_with_one_engine(way: str) -> None:
    expected = alone(varied_requests())
    async with started(fleet_of(way=way)) as fleet:
        for request, (outputs, _) in zip(varied_requests(), expected, strict=True):
            found, _ = await collect(await fleet.submit(request))
            assert [output.token for output in found] == [output.token for output in outputs]
        fresh = Request(np.arange(3, 203, dtype=np.int32), SamplingParams(max_tokens=3, temperature=0.0))
        _, report = await collect(await fleet.submit(fresh))
        assert report.loaded_tokens == report.cached_tokens == 192
        stats = await transfers_when_all_have_ended(fleet)
        assert stats["received_prefixes"] >= 2
        assert stats["failed"] == 0
        collector = EngineCollector()
        await collector.refresh(fleet)
        values = {sample.name: sample.value for family in collector.collect() for sample in family.samples}
        assert values["weft_transfer_sent_bytes_total"] == values["weft_transfer_received_bytes_total"] > 0
        assert {"weft_transfers_sending", "weft_transfers_receiving"} <= values.keys()


@asynccontextmanager
async def routed(backend: ProcessBackend) -> AsyncIterator[RemoteBackend]:
    """The same engine, as a router on another machine reaches it."""
    listener = socket.create_server(("127.0.0.1", 0))
    door = FleetListener(listener, backend, FleetDoor("127.0.0.1", 0, SECRET))
    remote = RemoteBackend(ReplicaAddress(*listener.getsockname()[:2]), SECRET)
    try:
        yield remote
    finally:
        await door.close()


@pytest.mark.thorough
@in_loop
async def test_a_router_over_tcp_pairs_replicas_by_the_roles_that_they_report():
    prefill, decode = backend_of("prefill"), backend_of("decode")
    async with started(prefill), started(decode), routed(prefill) as first, routed(decode) as second:
        fleet = FleetBackend([("first", first), ("second", second)], chooser=LeastOpen(), check_seconds=None)
        async with started(fleet):
            request = answered_prompt(0)
            [(expected, _)] = alone([request])
            found, report = await collect(await fleet.submit(request))
            assert [output.token for output in found] == [output.token for output in expected]
            assert report.loaded_tokens == len(request.prompt) // 64 * 64


def answered_prompt(seed: int) -> Request:
    """A prompt that shares its beginning with some others."""
    random = Random(seed)
    stem = np.random.default_rng(seed % 7).integers(0, 255, 64 * random.randint(1, 4))
    end = np.random.default_rng(1000 + seed).integers(0, 255, random.randint(1, 80))
    prompt = np.concatenate([stem, end]).astype(np.int32)
    salt = b"tenant" if random.random() < 0.2 else b""
    return Request(prompt, SamplingParams(max_tokens=random.randint(1, 4), temperature=0.0), salt=salt)


async def killed_at_random(requests: int, seed: int, way: str) -> dict[str, int]:
    """Send requests, some at a time, while processes of both roles are killed and restarted."""
    expected = [[output.token for output in outputs] for outputs, _ in alone(list(map(answered_prompt, range(200))))]
    random, counts = Random(seed), {"answered": 0, "failed": 0, "aborted": 0, "kills": 0}
    deadly = set(random.sample(range(requests), round(KILLED * requests)))

    async def one(fleet: FleetBackend, number: int) -> None:
        try:
            stream = await fleet.submit(answered_prompt(number % 200))
            if random.random() < 0.1:
                await asyncio.sleep(0)
                fleet.abort(stream)
                counts["aborted"] += 1
                return
            found, _ = await collect(stream)
        except (EngineStopped, RequestError):
            counts["failed"] += 1
        else:
            assert [output.token for output in found] == expected[number % 200]
            counts["answered"] += 1

    async with started(fleet_of(way=way, restart=True)) as fleet:
        waiting: set[asyncio.Task[None]] = set()
        for number in range(requests):
            waiting.add(asyncio.ensure_future(one(fleet, number)))
            if number in deadly:
                await asyncio.sleep(0.2 * random.random())
                backend = random.choice(fleet.members).backend
                assert isinstance(backend, ProcessBackend)
                assert backend.process_id is not None
                os.kill(backend.process_id, signal.SIGKILL)
                counts["kills"] += 1
                await until_all_answer(fleet, backend, backend.info)
            if len(waiting) >= 8:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        for task in waiting:
            await task
        await assert_nothing_is_left(fleet)
    return counts


async def until_all_answer(fleet: FleetBackend, killed: ProcessBackend, before: ModelInfo) -> None:
    """Until the killed engine was started again and takes requests."""
    async with asyncio.timeout(RESTART_SECONDS):
        while killed.info is before or not all(each.takes_requests for each in fleet.members):
            await asyncio.sleep(0.01)


async def assert_nothing_is_left(fleet: FleetBackend) -> None:
    """Neither engine has a request or a transfer, and a flush leaves nothing cached."""
    await transfers_when_all_have_ended(fleet)
    assert fleet.open == 0
    assert await fleet.flush() == 0
    stats = await fleet.stats()
    assert stats["slabs_used"] == 0
    assert stats["tiers"]["arrivals"]["used_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tcp", "nixl"])
def test_requests_are_answered_or_refused_once_while_either_side_is_killed(monkeypatch, way):
    # An engine that dies this often would not be started again.
    monkeypatch.setattr(process_backend, "RESTARTS_WITHIN_SECONDS", 0.0)
    # And would be left alone for up to a minute after each death.
    monkeypatch.setattr(member, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(member, "LONGEST_PAUSE_SECONDS", 0.2)
    counts = asyncio.run(killed_at_random(REQUESTS, SEED, needing_nixl(way)))
    print(counts)
    assert counts["answered"] + counts["failed"] + counts["aborted"] == REQUESTS
    assert counts["kills"] == round(KILLED * REQUESTS)
    assert counts["answered"] > 0.8 * REQUESTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "prefill"], "--role is prefill, which needs --fleet-listen"),
        (["--prefill-replicas", "1"], "--prefill-replicas must be less than --replicas, which is 1, got 1"),
        (["--replicas", "2", "--prefill-replicas", "2"], "must be less than --replicas, which is 2"),
        (["--replicas", "2", "--prefill-replicas", "1", "--no-cache"], "cannot be combined with --no-cache"),
        (["--transfer-listen", "127.0.0.1:0"], "--transfer-listen needs --role decode"),
        (["--arrivals", "much"], "--arrivals must be a size"),
        (["--transfer", "nixl"], "--transfer is nixl, which needs --role or --prefill-replicas"),
    ],
)
def test_roles_that_cannot_work_are_refused_by_name(arguments, message, capsys):
    assert main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("role", ["both", "prefill"])
def test_memory_for_arrivals_is_refused_without_a_decode_engine(role):
    door = {} if role == "both" else {"fleet_listen": "127.0.0.1:0", "fleet_secret": "secret"}
    with pytest.raises(OptionError, match="is memory of decode engines; it needs --role decode"):
        ServeOptions(arrivals="4GiB", role=role, **door)
    assert ServeOptions(arrivals="4GiB", replicas=2, prefill_replicas=1).arrivals == "4GiB"
