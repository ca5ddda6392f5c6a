"""A retained prefix outlives any traffic, within its share, until its end; and no longer than its tenant."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import parts, seed_of, thorough
from tests.support.hashed.drops import drop
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.tiered import TieredDevice, run_tiered, tiered_workload
from tests.support.hashed.workloads import check_answers, random_workload, run_workload
from weft.base.config import EngineConfig
from weft.base.retain import Retain
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.engine.events import FinishReason, Output, Report
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory import retention
from weft.memory.audit import audit
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger
from weft.memory.misses import Reason
from weft.memory.retention import Retentions
from weft.memory.valuation import Valuation

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "400")) // 12
KINDS = [{"recurrent": True}, {"recurrent": True, "heavy": True}, {"recurrent": False}, {"window": 7}]
ONE, TWO = b"1" * 32, b"2" * 32


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Server:
    """An engine on the hash device with a clock that a test sets."""

    def __init__(self, memory: int = 1 << 14, share: float = 0.25, host: int = 0, **spec: object) -> None:
        self.clock = Clock()
        self.spec = rolling_spec(**{"recurrent": True, **spec})
        # The least recently used goes first, so that what is evicted is known.
        sizes = {"memory_bytes": memory, "max_sequences": 4, "max_tokens_per_step": 16, "max_length": 400}
        config = EngineConfig(**sizes, host_bytes=host, retain_share=share, eviction="lru", paranoid=True)
        device = RollingDevice(self.spec, memory, 4)
        if host:
            device = TieredDevice(self.spec, memory, 4, False, host, Random(1))
            device.patience = 1.0
        self.engine = Engine(self.spec, device, config, now=self.clock)

    def ask(self, prompt: list[int], *retain: Retain, count: int = 1, salt: bytes = b"") -> Report:
        params = SamplingParams(max_tokens=count, temperature=0.0)
        number = self.engine.add(Request(np.array(prompt, np.int32), params, salt=salt, retain=retain))
        return self.finish(number)

    def finish(self, number: int) -> Report:
        ends: list[Output] = []
        while not ends:
            ends = [each for each in self.engine.step() if each.finish is not None and each.sequence == number]
        assert ends[0].finish is FinishReason.LENGTH
        report = self.engine.report(number)
        self.engine.forget(number)
        return report

    def crowd(self, count: int = 120, longest: int = 60, seed: int = 0, salt: bytes = b"") -> None:
        """Fill memory with other prompts, several times over."""
        random = Random(seed)
        for _ in range(count):
            self.ask([random.randrange(90) for _ in range(random.randint(1, longest))], salt=salt)

    @property
    def retained(self) -> dict[str, int]:
        return self.engine.stats()["retained"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_retained_prefix_survives_what_evicts_others_and_is_freed_at_its_end(kind: dict) -> None:
    server = Server(**kind)
    prompt, other = list(range(42)), list(range(42, 84))
    server.ask(prompt, Retain(10.0))
    server.ask(other)
    server.crowd()
    assert server.ask(prompt).cached_tokens == 40
    assert server.retained["tokens"] == 40
    assert server.ask(other).cached_tokens < 40
    server.clock.seconds = 10.0
    assert server.retained["bytes"] == 0
    assert server.retained["expired"] == 1
    server.crowd(seed=1)
    assert server.ask(prompt).cached_tokens < 40


@pytest.mark.thorough
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_what_is_retained_survives_thousands_of_requests_of_others(count: int) -> None:
    server, prompt = Server(), list(range(42))
    server.ask(prompt, Retain(1e6), salt=ONE)
    held = server.retained["bytes"]
    server.crowd(count, salt=TWO)
    assert server.retained["bytes"] == held <= server.engine.config.retain_share * server.engine.config.memory_bytes
    assert server.ask(prompt, salt=ONE).cached_tokens == 40
    server.ask(prompt, Retain(0.0), salt=ONE)
    assert server.retained["bytes"] == 0


def test_zero_seconds_release_what_is_retained_of_a_prompt() -> None:
    server = Server()
    prompt = list(range(42))
    server.ask(prompt, Retain(10.0))
    server.ask([9, 9, *prompt], Retain(0.0))
    assert server.retained["count"] == 1
    server.ask(prompt, Retain(0.0), salt=TWO)
    assert server.retained["count"] == 1
    server.ask(prompt, Retain(0.0))
    assert (server.retained["count"], server.retained["released"]) == (0, 1)


def test_a_prompt_that_ends_on_the_grid_can_be_sent_again_and_continued() -> None:
    server = Server()
    server.ask(list(range(40)), Retain(10.0))
    server.crowd()
    assert server.ask(list(range(40))).cached_tokens == 36
    assert server.ask(list(range(42))).cached_tokens == 40


def test_a_part_of_a_prompt_can_be_retained() -> None:
    server = Server()
    prompt = list(range(60))
    server.ask(prompt, Retain(10.0, 24))
    assert server.retained["tokens"] == 24
    server.crowd()
    assert 24 <= server.ask(prompt).cached_tokens < 56


def test_the_answer_is_retained_with_its_prompt() -> None:
    server = Server()
    server.ask(list(range(10)), Retain(10.0), count=20)
    assert server.retained["tokens"] == 28


def test_a_tenant_retains_at_most_its_share_and_what_ends_soonest_goes_first() -> None:
    server = Server()
    most = server.engine.config.retain_share * server.engine.config.memory_bytes
    for number in range(80):
        server.ask([number] * 40, Retain(1000.0 - number), salt=ONE)
        assert server.engine.ledger.retentions.bytes_of(tenant_digest(ONE)) <= most
    assert server.retained["over_share"] > 0
    assert server.ask([0] * 40, salt=ONE).cached_tokens == 36
    server.crowd(salt=ONE)
    found = server.ask([79] * 40, salt=ONE)
    assert found.cached_tokens < 36
    assert found.miss.reason is Reason.RETAINED_LOST
    # The rest of memory is for the others: one of them still has everything that it ran before.
    server.ask(list(range(40)), salt=TWO)
    assert server.ask(list(range(40)), salt=TWO).cached_tokens == 36


def test_a_lost_retention_is_a_miss_with_its_own_reason() -> None:
    server = Server()
    prompt = list(range(60))
    server.ask(prompt, Retain(10.0))
    server.engine.flush()
    assert server.ask(prompt).miss.reason is Reason.RETAINED_LOST
    assert server.engine.stats()["misses"]["retained_lost"] == 1
    # Computed again, it is an ordinary prefix; and after its time it would have been gone anyway.
    server.ask([7, *prompt], Retain(10.0))
    server.engine.flush()
    server.clock.seconds = 11.0
    assert server.ask([7, *prompt]).miss.reason is not Reason.RETAINED_LOST


def test_a_lost_retention_is_looked_for_once_for_each_start_and_not_while_requests_wait(monkeypatch) -> None:
    calls: Counter[str] = Counter()

    def count(kind: type, name: str) -> None:
        original = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, **more: calls.update([name]) or original(*args, **more))

    count(Retentions, "explain")
    count(Ledger, "open")
    server, params = Server(), SamplingParams(max_tokens=20, temperature=0.0)
    for number in range(12):
        server.engine.add(Request(np.full(40, number, np.int32), params))
    while not server.engine.idle:
        server.engine.step()
    assert calls["explain"] == calls["open"] >= 12


def test_all_tenants_together_retain_at_most_half_of_memory_and_the_largest_gives_way() -> None:
    server = Server(1 << 15)
    for number in range(200):
        salt = bytes([number % 5]) * 32
        server.ask([number % 90] * 30 + [number % 5], Retain(1000.0), salt=salt)
        assert server.retained["bytes"] <= server.engine.config.memory_bytes / 2
    held = [server.engine.ledger.retentions.bytes_of(tenant_digest(bytes([each]) * 32)) for each in range(5)]
    assert min(held) > 0
    assert max(held) < 2 * min(held)


def steps_for(server: Server, prompts: list[list[int]]) -> int:
    """Return how many steps an ordinary tenant's requests take that come at once."""
    params = SamplingParams(max_tokens=60, temperature=0.0)
    for prompt in prompts:
        server.engine.add(Request(np.array(prompt, np.int32), params, salt=b"9" * 32))
    steps = 0
    while not server.engine.idle:
        server.engine.step()
        steps += 1
    return steps


# Units of several kinds share memory in whole slabs, and retained units may leave gaps in theirs.
SLOWER_BY_GAPS = 1.25


def check_that_others_are_not_starved(seed: int, share: float, kind: dict) -> None:
    """Requests of others are as fast as in a server that has only the other half of memory, and hit what they ran.

    Nothing that is retained has to be given up for that.
    """
    random, memory, other = Random(seed), 1 << 15, b"9" * 32
    server = Server(memory, share=share, **kind)
    for number in range(40):
        prompt = [random.randrange(90) for _ in range(random.randint(20, 100))]
        server.ask(prompt, Retain(1000.0), salt=bytes([number % 5]) * 32)
    assert server.retained["bytes"] > memory / 4
    prompts = [[random.randrange(90) for _ in range(random.randint(20, 40))] for _ in range(8)]
    alone = steps_for(Server(memory // 2, **kind), prompts)
    assert steps_for(server, prompts) <= SLOWER_BY_GAPS * alone
    assert server.retained["given_up"] == 0
    last = [random.randrange(90) for _ in range(41)]
    server.ask(last, salt=other)
    assert server.ask(last, salt=other).cached_tokens == 40


@pytest.mark.parametrize("part", parts(2))
@pytest.mark.parametrize("kind", KINDS)
@thorough(EXAMPLES // 30)
@given(seed=st.integers(0, 1 << 40), share=st.sampled_from([0.2, 0.25, 0.5]))
def test_keys_that_retain_everything_leave_the_rest_of_memory_to_others(part, seed, share, kind) -> None:
    check_that_others_are_not_starved(seed_of(part, seed), share, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_bound_of_all_keys_others_would_be_starved(kind: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SHARE_OF_ALL", 1.0)
    with pytest.raises(AssertionError):
        check_that_others_are_not_starved(1, 0.25, kind)


def test_a_request_that_needs_all_memory_gets_it() -> None:
    """What is retained goes last, but a request that was accepted is answered."""
    server = Server(1 << 13)
    server.ask(list(range(30)), Retain(100.0))
    longest = max(n for n in range(400) if server.engine.ledger.fits_alone(n))
    server.ask([5] * (longest - 1))
    audit(server.engine.ledger)


def test_a_drop_ends_what_its_tenant_retains() -> None:
    server = Server()
    server.ask(list(range(42)), Retain(100.0), salt=ONE)
    server.ask(list(range(42)), Retain(100.0), salt=TWO)
    found = drop(server.engine, tenant_digest(ONE))
    assert found["left_tokens"] == 0
    assert (server.retained["count"], server.retained["dropped"]) == (1, 1)
    assert server.ask(list(range(42)), salt=ONE).cached_tokens == 0
    assert server.ask(list(range(42)), salt=TWO).cached_tokens == 40


def test_a_request_that_runs_while_its_tenant_is_dropped_retains_nothing() -> None:
    server = Server()
    params = SamplingParams(max_tokens=30, temperature=0.0)
    server.engine.add(Request(np.arange(40, dtype=np.int32), params, salt=ONE, retain=(Retain(100.0),)))
    for _ in range(5):
        server.engine.step()
    server.engine.begin_drop(0, tenant_digest(ONE))
    while not server.engine.idle:
        server.engine.step()
    assert server.retained["count"] == 0


def fill(server: Server) -> list[tuple[list[int], bytes]]:
    """Retain prompts up to the share of all tenants; return those that still are, with their salts."""
    asked = [([number] * 60, bytes([number % 5]) * 32) for number in range(12)]
    for prompt, salt in asked:
        server.ask(prompt, Retain(1000.0), salt=salt)
    cell, kept = server.spec.cell, set(server.engine.ledger.retentions.seconds_left(server.engine.ledger.cache))
    return [
        (prompt, salt)
        for prompt, salt in asked
        if kept & {*PrefixIdentity(cell, salt).keys(np.array(prompt, np.int32))}
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_with_host_memory_what_is_retained_moves_there_before_a_request_is_refused(kind: dict) -> None:
    server = Server(1 << 14, host=1 << 16, **kind)
    without = Server(1 << 14, **kind)
    kept = fill(server)
    fill(without)
    held = server.retained["bytes"]
    # More than the rest of memory holds at once.
    prompts = [[number] * 60 for number in range(3)]
    assert steps_for(server, prompts) < steps_for(without, prompts)
    assert server.retained["moved"] > 0
    assert (server.retained["bytes"], server.retained["given_up"]) == (held, 0)
    assert 0 < server.retained["host_bytes"] <= held
    found = [server.ask([*prompt, 7, 7], salt=salt) for prompt, salt in kept]
    assert [each.cached_tokens for each in found] == [60] * len(kept)
    assert sum(each.loaded_tokens for each in found) > 0
    server.clock.seconds = 2000.0
    server.ask([5])
    assert (server.retained["bytes"], server.retained["host_bytes"]) == (0, 0)


class Demoted(Server):
    """A retained prefix that lies in host memory only."""

    def __init__(self, host: int = 1 << 17) -> None:
        super().__init__(host=host)
        self.ask(list(range(42)), Retain(100.0), salt=ONE)
        while not self.retained["moved"]:
            self.engine.ledger.makes_room()
            self.ask([1], salt=TWO)
        self.ask([6] * 300, salt=TWO)
        assert self.engine.ledger.match(self.keys, 41).cached < 40

    @property
    def keys(self) -> list[bytes]:
        return PrefixIdentity(self.spec.cell, ONE).keys(np.arange(42, dtype=np.int32))


def test_what_moved_to_host_memory_survives_there() -> None:
    server = Demoted(host=1 << 14)
    server.crowd(80, salt=TWO)
    found = server.ask(list(range(42)), salt=ONE)
    assert (found.cached_tokens, found.loaded_tokens) == (40, 40)


def test_what_moved_to_host_memory_is_released_and_dropped_there() -> None:
    released, dropped = Demoted(), Demoted()
    released.ask(list(range(42)), Retain(0.0), salt=ONE)
    assert (released.retained["count"], released.retained["host_bytes"]) == (0, 0)
    drop(dropped.engine, tenant_digest(ONE))
    assert (dropped.retained["dropped"], dropped.retained["host_bytes"]) == (1, 0)
    assert dropped.ask(list(range(42)), salt=ONE).cached_tokens == 0


def test_what_moved_to_host_memory_is_loaded_while_its_request_waits_for_a_seat() -> None:
    server = Demoted()
    running = SamplingParams(max_tokens=20, temperature=0.0)
    for number in range(4):
        server.engine.add(Request(np.array([number], np.int32), running, salt=TWO))
    server.engine.step()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    number = server.engine.add(Request(np.arange(42, dtype=np.int32), params, salt=ONE))
    while server.engine.ledger.match(server.keys, 41).cached < 40:
        assert server.engine.ledger.retentions.stats()["count"] == 1
        server.engine.step()
    assert len(server.engine.planner.queue) == 1, "it was loaded only when it could start"
    assert server.finish(number).loaded_tokens == 40


class RetainingEngine(Engine):
    """Retains, releases and drops at random; its clock goes on with the steps."""

    def __init__(self, *args: object) -> None:
        self.random, self.ticks = Random("retain"), Clock()
        super().__init__(*args, now=self.ticks)
        self.drops = 0

    def add(self, request: Request, constraint: object = None) -> int:
        retain = [self._asked(len(request.prompt)) for _ in range(self.random.choice([0, 1, 1, 2]))]
        return super().add(msgspec.structs.replace(request, retain=tuple(retain)), constraint)

    def _asked(self, prompt: int) -> Retain:
        seconds = self.random.choice([0.0, 5.0, 40.0, 1000.0])
        return Retain(seconds, self.random.choice([None, self.random.randint(0, prompt)]))

    def step(self) -> list[Output]:
        self.ticks.seconds += 1.0
        if self.random.random() < 0.03:
            self.drops += 1
            self.begin_drop(self.drops, tenant_digest(self.random.choice([b"", b"tenant"])))
            for node in (node for cache in self.ledger.caches for node in self.ledger.retentions.nodes(cache)):
                tenant = self.ledger.tenancy.of(node)
                assert not self.ledger.hidden.covers([], partial(bytes, tenant)), "what is dropped is still retained"
        outputs = super().step()
        self.take_dropped()
        most = int(self.config.retain_share * self.config.memory_bytes)
        for salt in (b"", b"tenant"):
            assert self.ledger.retentions.bytes_of(tenant_digest(salt)) <= most
        return outputs


def check_workload(seed: int, count: int, **overrides: object) -> None:
    run = run_workload(random_workload(seed, count, **overrides), RetainingEngine)
    assert run.engine.ledger.retentions.held_bytes <= run.engine.config.memory_bytes
    run.engine.ledger.retentions.give_up()
    audit(run.engine.ledger)
    check_answers(random_workload(seed, count, **overrides), run)


def check_tiered_workload(seed: int, count: int, share: float) -> None:
    workload = tiered_workload(seed, count)
    workload = replace(workload, config=replace(workload.config, retain_share=share))
    run_tiered(workload, seed, engine_class=RetainingEngine)


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10), share=st.sampled_from([0.1, 0.4, 1.0]))
def test_answers_are_the_oracles_with_host_memory_too(part, seed, count, share) -> None:
    check_tiered_workload(seed_of(part, seed), count, share)


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10), share=st.sampled_from([0.1, 0.4, 1.0]))
def test_answers_are_the_oracles_whatever_is_retained_released_and_dropped(part, seed, count, share) -> None:
    check_workload(seed_of(part, seed), count, retain_share=share)


def a_retention_outlives_its_tenants_drop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retentions, "drop", lambda self, chosen: None)


def a_retained_point_is_evicted(patch: pytest.MonkeyPatch) -> None:
    original = Valuation.expect

    def forget(self, points):
        for point in points:
            point.retained = False
        original(self, points)

    patch.setattr(Valuation, "expect", forget)


def a_retention_does_not_end(patch: pytest.MonkeyPatch) -> None:
    original = Retentions.give_up
    patch.setattr(Retentions, "give_up", lambda self: original(self) if len(self) > 1 else None)


def what_moved_is_not_protected(patch: pytest.MonkeyPatch) -> None:
    original = Retentions._protect

    def forget(self, each):
        original(self, each)
        if each.cache is not self._cache and each.node.resume is not None:
            each.node.resume.retained = False

    patch.setattr(Retentions, "_protect", forget)


def what_moved_outlives_its_tenants_drop(patch: pytest.MonkeyPatch) -> None:
    original = Retentions.drop
    patch.setattr(
        Retentions,
        "drop",
        lambda self, chosen: original(self, lambda node: node in set(self.nodes(self._cache)) and chosen(node)),
    )


def a_failed_move_unprotects(patch: pytest.MonkeyPatch) -> None:
    """A retention moves although its copy did not land."""
    patch.setattr("weft.memory.tiers.saves.Saves.has", lambda self, node: node.key in self.lower.trie.nodes)


def check_workloads(count: int) -> None:
    for seed in range(count):
        check_workload(seed, 8, retain_share=0.4)


def check_tiered_workloads(count: int) -> None:
    for seed in range(count):
        check_tiered_workload(seed, 8, share=1.0)


PLANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    a_retention_outlives_its_tenants_drop,
    a_retained_point_is_evicted,
    a_retention_does_not_end,
]


TIERED_PLANTS = [what_moved_is_not_protected, what_moved_outlives_its_tenants_drop, a_failed_move_unprotects]


@pytest.mark.parametrize("plant", TIERED_PLANTS, ids=lambda each: each.__name__)
def test_planted_bugs_of_retentions_in_host_memory_are_caught(plant, monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_tiered_workloads(400)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda each: each.__name__)
def test_planted_bugs_of_retentions_are_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_workloads(400)
