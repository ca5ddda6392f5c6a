"""Prefill and decode engines that are tensor-parallel groups: each rank sends its part, and answers are the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.models import tiny_model
from tests.support.models.engines import TINY, Ask
from tests.support.models.oracle import Oracle
from tests.support.servers.backends import collect, started
from tests.support.servers.held_steps import SECONDS
from tests.support.transfer.engine_pairs import EnginePair
from tests.support.transfer.processes import SECRET, transfers_when_all_have_ended
from weft import LLM
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.base.transfers import Destination, TransferSettings
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.choosing import LeastOpen
from weft.fleet.pairing import destination_of
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.ray.members import Announcement, Follower, MemberList
from weft.ray.replica import EngineReplica
from weft.ray.settings import parse
from weft.start.engine_process import load_engine
from weft.start.process_backend import ProcessBackend

OPTIONS = {"memory": "16MiB", "max_length": 512, "max_sequences": 4, "threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
# A prompt, one that continues it, one of another tenant, and one that has nothing to do with them.
STEM = np.random.default_rng(3).integers(3, 90, 260).tolist()
PROMPTS = [STEM[:150], STEM, STEM[:150], np.random.default_rng(4).integers(3, 90, 200).tolist()]
SALTS = [b"", b"", b"tenant", b""]


FAMILIES = ("falcon_h1", "gpt_oss", "qwen3_5")


def options_of(folder: Path) -> Options:
    return Options(model=str(folder), tensor_parallel=2, **OPTIONS)


def settings_of(role: str) -> TransferSettings:
    return TransferSettings(role, SECRET, arrivals="16MiB")


def expected_of(folder: Path) -> list[list[int]]:
    """The answers of one engine that is not cut."""
    with LLM(str(folder), progress=False, **OPTIONS) as llm:
        return [llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids for prompt in PROMPTS]


@contextmanager
def two_groups(folder: Path) -> Iterator[EnginePair]:
    """Two engines in this process, each with a second rank in a process of its own."""
    prefill, _ = load_engine(options_of(folder), False, settings_of("prefill"))
    try:
        decode, info = load_engine(options_of(folder), False, settings_of("decode"))
        for engine in (prefill, decode):
            # Not the end of this process, as in a server's engine process.
            engine._device.others.on_death = lambda failure: None
        member = SimpleNamespace(backend=SimpleNamespace(info=info))
        try:
            yield EnginePair(prefill, decode, destination_of(member))
        finally:
            decode.close()
    finally:
        prefill.close()


@pytest.mark.thorough
def test_two_groups_of_two_ranks_answer_like_one_engine(tmp_path):
    folder = Oracle(TINY["falcon_h1"]).save(tmp_path)
    given = [Ask(prompt, GREEDY, salt=salt) for prompt, salt in zip(PROMPTS, SALTS, strict=True)]
    with two_groups(folder) as pair:
        found = pair.serve(given)
        stats = pair.prefill.stats()["transfers"] | pair.decode.stats()["transfers"]
        # Also after an abort in the middle, on both sides and all ranks.
        number = pair.prefill.add(prefix_of(STEM[::-1], pair.place))
        pair.prefill.step()
        pair.prefill.abort(number)
        run_until_ended(pair)
        assert_nothing_is_left(pair)
    assert [answer.tokens for answer in found] == expected_of(folder)
    # Everything but the last cell has arrived; of the second prompt, what the first had not brought already.
    assert [answer.report.loaded_tokens for answer in found] == [128, 128, 128, 192]
    assert (stats["sent_prefixes"], stats["received_prefixes"], stats["failed"]) == (4, 4, 0)


def prefix_of(prompt: list[int], place: Destination) -> Request:
    params = SamplingParams(max_tokens=0, temperature=0.0)
    return Request(np.array(prompt[:256], np.int32), params, send_to=place)


def run_until_ended(pair: EnginePair) -> None:
    """Step both engines until neither has a transfer."""
    deadline = time.monotonic() + SECONDS
    while pair.prefill.ledger.departures.active or pair.decode.ledger.tiers.arrivals.incoming:
        assert time.monotonic() < deadline
        pair.prefill.step()
        pair.decode.step()


def assert_nothing_is_left(pair: EnginePair) -> None:
    for engine in (pair.prefill, pair.decode):
        engine.flush()
        assert engine.ledger.arena.used_slabs == 0
    assert pair.prefill.ledger.departures.arena.used_slabs == 0
    assert pair.decode.ledger.tiers.arrivals.lower.arena.used_slabs == 0


async def answers_of_servers(folder: Path) -> list[list[int]]:
    """The answers of a fleet whose members are engine processes with two ranks each."""
    roles = ("prefill", "decode")
    members = [(role, ProcessBackend(options_of(folder), progress=False, transfer=settings_of(role))) for role in roles]
    fleet = FleetBackend(members, chooser=LeastOpen(), check_seconds=0.05)
    found = []
    async with started(fleet):
        for prompt, salt in zip(PROMPTS, SALTS, strict=True):
            outputs, report = await collect(await fleet.submit(Request(np.array(prompt, np.int32), GREEDY, salt=salt)))
            found.append([output.token for output in outputs])
            assert report.loaded_tokens >= 128
        stats = await transfers_when_all_have_ended(fleet)
        assert (stats["sent_prefixes"], stats["received_prefixes"], stats["failed"]) == (4, 4, 0)
        assert await fleet.flush() == 0
        left = await fleet.stats()
        assert left["slabs_used"] == left["tiers"]["arrivals"]["used_bytes"] == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fleet_of_groups_answers_like_one_engine(family, tmp_path):
    folder = Oracle(TINY[family]).save(tmp_path)
    assert asyncio.run(answers_of_servers(folder)) == expected_of(folder)


async def answer_by_way_of_a_pool(secret: Path) -> tuple[list[int], int]:
    """The answer of replicas as Ray starts them, one of each role, and how many tokens of its prompt had arrived."""
    options = {"model": str(tiny_model.FOLDER), "weights": "dummy", "memory": "16MiB", "max_length": 512, "threads": 1}
    settings = parse({"options": options | {"arrivals": "16MiB"}, "prefill": {"secret_file": str(secret)}})
    listed = MemberList()
    replicas = [EngineReplica(settings, role, "127.0.0.1", listed.announce, role) for role in ("prefill", "decode")]
    fleet = FleetBackend([], chooser=LeastOpen(), check_seconds=0.05, patient=True)
    follower = Follower(fleet, settings.version, connect, drain_seconds=0)
    try:
        await asyncio.gather(*(replica.start() for replica in replicas))
        async with asyncio.timeout(SECONDS):
            while len(await listed.members()) < 2:
                await asyncio.sleep(0.01)
        await follower.read(listed.members)
        async with started(fleet):
            async with asyncio.timeout(SECONDS):
                while not all(member.takes_requests for member in fleet.members):
                    await asyncio.sleep(0.01)
            outputs, report = await collect(await fleet.submit(Request(np.arange(3, 203, dtype=np.int32), GREEDY)))
            return [output.token for output in outputs], report.loaded_tokens
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))


def connect(replica: Announcement) -> RemoteBackend:
    return RemoteBackend(ReplicaAddress(replica.host, replica.port), replica.secret.encode())


@pytest.mark.slow
def test_replicas_of_a_fleet_on_ray_have_the_roles_that_its_settings_give_them(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    secret.chmod(0o600)
    tokens, loaded = asyncio.run(answer_by_way_of_a_pool(secret))
    assert (len(tokens), loaded) == (6, 192)
