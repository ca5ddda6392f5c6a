"""Replicas on one machine: each has its own GPU or cores, and together they answer as one engine does."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.models import tiny_model
from tests.support.servers.backends import alone, ask, collect, in_loop, started, tokens_of, varied_requests
from tests.support.servers.fake_engines import PROGRAM, answer
from tests.support.servers.held_steps import SECONDS
from weft.base.errors import EngineStopped, InvalidOption, RequestError
from weft.base.grid import CELL
from weft.base.options import Options, SizingFacts, resolve
from weft.cli.main import main
from weft.engine.load import ReplicaLoad
from weft.fleet.backend import FleetBackend
from weft.fleet.local import divide, visible_gpus
from weft.fleet.member import MemberState
from weft.fleet.router import FleetRouter
from weft.fleet.routing import RoutedChoice
from weft.memory.keys import PrefixIdentity
from weft.start.process_backend import ProcessBackend

SMALL = Options(**tiny_model.OPTIONS, memory="16MiB", max_length=512, max_sequences=4, threads=1)
LONG = 100_000


def test_gpus_are_given_out_one_each():
    found = divide(Options(), 2, gpus=lambda: ["0", "GPU-7", "2"])
    assert [each.variables for each in found] == [(("CUDA_VISIBLE_DEVICES", name),) for name in ("0", "GPU-7")]
    assert [each.cores for each in found] == [(), ()]
    with pytest.raises(InvalidOption, match="replicas is 4 but 3 GPUs are visible"):
        divide(Options(), 4, gpus=lambda: ["0", "1", "2"])


def test_a_replica_with_ranks_has_a_gpu_for_each_or_shares_its_threads_among_them():
    found = divide(Options(tensor_parallel=2), 2, gpus=lambda: ["0", "1", "2", "3", "4"])
    assert [dict(each.variables)["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1", "2,3"]
    with pytest.raises(InvalidOption, match="replicas is 3 of 2 GPUs each but 5 GPUs are visible; pass at most 2"):
        divide(Options(tensor_parallel=2), 3, gpus=lambda: ["0", "1", "2", "3", "4"])
    machine = {"gpus": list, "cores": lambda: list(range(8)), "usable": lambda: 8}
    [alone, _] = divide(Options(device="cpu"), 2, **machine)
    [cut, _] = divide(Options(device="cpu", tensor_parallel=2), 2, **machine)
    assert cut.options.threads == max(1, alone.options.threads // 2)


def test_cores_threads_and_memory_are_divided_on_a_cpu():
    machine = {"gpus": lambda: ["0"], "cores": lambda: [0, 1, 4, 5, 6], "usable": lambda: 5}
    found = divide(Options(device="cpu", disk="cells", disk_size="1GiB"), 2, **machine)
    assert [each.cores for each in found] == [(0, 1), (4, 5)]
    assert [each.options.disk for each in found] == ["cells.0", "cells.1"]
    assert {each.options.memory for each in found} == {"auto/2"}
    assert len({each.options.seed for each in found}) == 2, "or they would draw the same random numbers"
    dummies = divide(Options(device="cpu", weights="dummy"), 2, **machine)
    assert {each.options.seed for each in dummies} == {0}, "or their weights would differ"
    assert {each.options.memory for each in divide(Options(device="cpu", memory="1GiB"), 2, **machine)} == {"1GiB"}
    with pytest.raises(InvalidOption, match="replicas is 6 but 5 cores are usable"):
        divide(Options(device="cpu"), 6, **machine)


def test_a_share_of_auto_is_a_share_of_what_auto_is():
    facts = SizingFacts(free_bytes=4 << 30, model_length=512, longest=lambda size: 512, least_bytes=1)
    whole, _ = resolve(Options(), facts)
    half, reasons = resolve(Options(memory="auto/2"), facts)
    assert half.memory_bytes == whole.memory_bytes // 2 == 1 << 30
    assert "divided by 2" in reasons["memory"]


def test_visible_gpus_come_from_the_environment_or_from_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1")
    assert visible_gpus(tmp_path) == ["3", "GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus(tmp_path) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]


def test_replicas_in_one_process_are_refused_by_name(capsys):
    assert main(["serve", "--replicas", "2", "--in-process"]) == 2
    assert "--replicas is 2, but --in-process allows one engine" in capsys.readouterr().err


def fleet_of(*members: ProcessBackend, **more: object) -> FleetBackend:
    return FleetBackend([(str(place), member) for place, member in enumerate(members)], **more)


class EqualReplicas(FleetRouter):
    """A router that ignores measured rates: on a busy machine they would decide where requests go."""

    def report(self, name: str, load: ReplicaLoad) -> None:
        super().report(name, replace(load, token_seconds=None, step_seconds=0.0))


@pytest.mark.thorough
@in_loop
async def test_answers_of_two_replicas_are_those_of_one_engine():
    expected = alone(varied_requests())
    members = [ProcessBackend(SMALL, progress=False) for _ in range(2)]
    choice = RoutedChoice(EqualReplicas(CELL))
    async with started(fleet_of(*members, chooser=choice)) as fleet:
        requests = varied_requests()
        # Random numbers are drawn per engine; these answers depend on the request alone.
        streams = await asyncio.gather(*(fleet.submit(request) for request in requests))
        used = {stream.member.name for stream in streams}
        for (found, _), (outputs, _) in zip(await asyncio.gather(*map(collect, streams)), expected, strict=True):
            assert [output.token for output in found] == [output.token for output in outputs]
        assert used == {"0", "1"}
        fresh = ask(list(range(50, 200)), 3)
        stream = await fleet.submit(fresh)
        holder = stream.member
        await collect(stream)
        mirror, keys = choice.router.replicas[holder.name].mirror, PrefixIdentity(CELL).keys(fresh.prompt)
        async with asyncio.timeout(SECONDS):
            while keys[-1] not in choice.router.index.held(mirror):
                await asyncio.sleep(0.001)
        stream = await fleet.submit(msgspec.structs.replace(fresh, prompt=np.append(fresh.prompt, 7).astype(np.int32)))
        assert stream.member is holder, "its prefix is cached there"
        assert (await collect(stream))[1].cached_tokens == 128


@in_loop
async def test_a_killed_replica_costs_only_what_it_has_begun_and_comes_back():
    cores = sorted(os.sched_getaffinity(0))[:1]
    members = [ProcessBackend(Options(model="0.002"), program=PROGRAM, restart=True, cores=cores) for _ in range(2)]
    async with started(fleet_of(*members, check_seconds=0.01)) as fleet:
        streams = [await fleet.submit(ask([index], LONG)) for index in range(20, 26)]
        for stream in streams:
            await anext(stream)
        victim = members[0]
        assert os.sched_getaffinity(victim.process_id) == set(cores)
        lost = [stream for stream in streams if stream.member.name == "0"]
        kept = [stream for stream in streams if stream.member.name == "1"]
        assert len(lost) == 3
        os.kill(victim.process_id, signal.SIGKILL)
        for stream in lost:
            with pytest.raises(EngineStopped):
                await collect(stream)
        # Requests go on: none is refused while one replica is left.
        prompts = [[index] for index in range(20, 40)]
        found = await asyncio.gather(*(tokens_of(fleet, ask(prompt, 5)) for prompt in prompts))
        assert found == [answer(prompt, 5) for prompt in prompts]
        for stream in kept:
            assert await anext(stream)
            fleet.abort(stream)
        async with asyncio.timeout(SECONDS):
            while fleet.open or fleet.members[0].state is not MemberState.UP:
                await asyncio.sleep(0.01)
        assert fleet.members[0].ejections == 1


@pytest.mark.slow
@in_loop
async def test_processes_killed_at_random_lose_no_request_that_has_not_begun():
    choose = random.Random(7)
    members = [ProcessBackend(Options(model="0.001"), program=PROGRAM, restart=True) for _ in range(3)]
    ends: Counter[str] = Counter()
    async with started(fleet_of(*members, chooser=RoutedChoice(), check_seconds=0.01)) as fleet:

        async def client(place: int) -> None:
            prompt, count, found = [20 + place % 200], choose.randrange(1, 200), []
            try:
                async for batch in await fleet.submit(ask(prompt, count)):
                    found += [output.token for output in batch]
            except (EngineStopped, RequestError):
                # Refused while no replica was left, or cut off after it had begun.
                ends["cut" if found else "refused"] += 1
            else:
                assert len(found) == count
                ends["answered"] += 1
            assert found == answer(prompt, count)[: len(found)]

        for place in range(0, 2000, 20):
            running = [asyncio.ensure_future(client(place + each)) for each in range(20)]
            victim = choose.choice(members)
            if choose.random() < 0.05 and victim.healthy:
                os.kill(victim.process_id, signal.SIGKILL)
            await asyncio.gather(*running)
        assert sum(ends.values()) == 2000
        assert ends["answered"] > 1500
        assert fleet.open == 0
        for member in members:
            async with asyncio.timeout(SECONDS):
                while not member.healthy:
                    await asyncio.sleep(0.01)
            assert (member.open, (await member.stats())["open"]) == (0, 0)
