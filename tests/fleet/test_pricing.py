"""What waiting at a replica costs, against queues that are played out request by request."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hashed import mirrored
from tests.support.hashed.mirrored import MirroredEngine
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.workloads import random_workload
from weft.base.config import EngineConfig
from weft.base.plan import Plan
from weft.base.sampling import SamplingParams
from weft.engine.load import PromptCosts, ReplicaLoad
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.fleet.pricing import PromptSpeed, PromptWork
from weft.fleet.router import FleetRouter, ReplicaView, RoutingPolicy
from weft.memory.journal import CacheChanges, Tier

CELL = 64
# Only a request's own time counts.
SELFISH = RoutingPolicy(work=0, crowd=0, fill=0)
DRAWS = 1500
Patch = pytest.MonkeyPatch


class Hand:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replica(clock: Hand, **load: object) -> FleetRouter:
    """A router with a replica that computes so fast that only seats and memory are waited for."""
    router = FleetRouter(CELL, SELFISH, clock)
    router.add("a")
    router.report("a", ReplicaLoad(token_seconds=1e-12, **load))
    return router


def answer(router: FleetRouter, clock: Hand, seconds: float) -> None:
    """Let the router see an answer that takes this long."""
    number = router.assign(router.choose([], 10)[0], [], 10)
    router.started(number)
    clock.now += seconds
    router.ended(number)


def played_out(units: list[float], wanted: list[float], free: float, seconds: float, random: Random) -> float:
    """Return when the last request of a queue gets its units, first come, first served.

    Holders of `units` and those that follow keep them for exponentially distributed times.
    """
    leaving = [(random.expovariate(1 / seconds), size) for size in units]
    heapify(leaving)
    now = 0.0
    for size in wanted:
        while free < size:
            now, back = heappop(leaving)
            free += back
        free -= size
        heappush(leaving, (now + random.expovariate(1 / seconds), size))
    return now


# seats ----------------------------------------------------------------------------------------------------------------


def check_seats(seats: int, running: int, waiting: int, later: int, seconds: float, seed: int) -> None:
    """`later` of the waiting requests have a lower priority."""
    clock, random = Hand(), Random(seed)
    router = replica(clock, max_sequences=seats)
    answer(router, clock, seconds)
    for number in range(running + waiting):
        priority = 9 if number >= running + waiting - later else 0
        assigned = router.assign(router.choose([], 10, priority)[0], [], 10, priority)
        if number < running:
            router.started(assigned)
    expected = router.choose([], 10)[0].seconds
    queue = [1.0] * (waiting - later + 1)
    found = mean(played_out([1.0] * running, queue, float(seats - running), seconds, random) for _ in range(DRAWS))
    assert expected == pytest.approx(found, rel=0.15, abs=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 8), st.integers(0, 12), st.data(), st.floats(0.1, 100), st.integers(0, 1 << 30))
def test_full_seats_cost_the_expected_time_until_one_is_free(seats, requests, data, seconds, seed):
    running = min(seats, requests)
    waiting = requests - running
    check_seats(seats, running, waiting, data.draw(st.integers(0, waiting)), seconds, seed)


def test_requests_of_another_router_take_seats_too():
    clock = Hand()
    router = replica(clock, max_sequences=4)
    answer(router, clock, 12.0)
    router.report("a", ReplicaLoad(token_seconds=1e-12, max_sequences=4, running=4, waiting=0))
    assert router.choose([], 10)[0].seconds == pytest.approx(3.0)


def test_a_conversation_leaves_a_replica_without_seats_only_if_computing_elsewhere_is_faster():
    prompt = [bytes([depth]) * 32 for depth in range(15)]
    held = CacheChanges(1, 0, True, (prompt[-1],), (15 * CELL,), bytes([Tier.DEVICE]), b"\1")
    # A seat is free after half of this time; computing 960 tokens takes 0.96 seconds.
    for seconds, expected in ((4.0, "b"), (0.4, "a")):
        clock = Hand()
        router = FleetRouter(CELL, SELFISH, clock)
        for name in "ab":
            router.add(name)
            router.report(name, ReplicaLoad(token_seconds=1e-3, max_sequences=2))
        router.apply("a", held)
        answer(router, clock, seconds)
        assert router.choose(prompt, 1000)[0].replica == "a"
        router.report("a", ReplicaLoad(token_seconds=1e-3, max_sequences=2, running=2))
        assert router.choose(prompt, 1000)[0].replica == expected


# memory ---------------------------------------------------------------------------------------------------------------


def check_memory(running: int, each: int, free: int, ahead: int, own: int, seconds: float, seed: int) -> None:
    """A token takes a byte. The request ahead and the new one need memory of `ahead` and `own` running ones."""
    clock, random, size = Hand(), Random(seed), 1000
    memory = {"memory_bytes": running * each * size + free, "held_bytes": running * each * size, "token_bytes": 1.0}
    router = replica(clock, max_sequences=100)
    answer(router, clock, seconds)
    router.report("a", ReplicaLoad(token_seconds=1e-12, max_sequences=100, running=running, **memory))
    queue = [float(tokens * each * size) for tokens in (ahead, own) if tokens]
    for tokens in queue[:-1]:
        router.assign(router.choose([], int(tokens))[0], [], int(tokens))
    expected = router.choose([], int(queue[-1]))[0].seconds
    found = mean(played_out([float(each * size)] * running, queue, free, seconds, random) for _ in range(DRAWS))
    assert expected == pytest.approx(found, rel=0.35, abs=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data(), st.integers(1, 8), st.floats(0.1, 100), st.integers(0, 1 << 30))
def test_memory_full_of_running_sequences_costs_the_expected_time_until_enough_is_free(data, running, seconds, seed):
    own = data.draw(st.integers(1, running))
    ahead = data.draw(st.integers(0, 1))
    free = data.draw(st.sampled_from([0, 100, 900]))
    check_memory(running, 2, free, ahead, own, seconds, seed)


def test_memory_that_the_cache_holds_costs_nothing():
    clock = Hand()
    router = replica(
        clock, max_sequences=8, running=4, memory_bytes=1000, held_bytes=400, used_memory=1.0, token_bytes=1.0
    )
    assert router.choose([], 600)[0].seconds == pytest.approx(0.0, abs=1e-6)
    assert router.choose([], 601)[0].seconds > 1.0


# planted bugs ---------------------------------------------------------------------------------------------------------

PLANTS: list[Callable[[Patch], None]] = []


def plant(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
    PLANTS.append(sow)
    return sow


@plant
def full_seats_cost_nothing(patch: Patch) -> None:
    patch.setattr(ReplicaView, "seat_seconds", lambda self, priority, keeping: 0.0)


@plant
def only_the_next_seat_is_waited_for(patch: Patch) -> None:
    original = ReplicaView.seat_seconds

    def next_seat(self, priority, keeping):
        return min(original(self, priority, keeping), keeping / max(1, self.load.max_sequences))

    patch.setattr(ReplicaView, "seat_seconds", next_seat)


@plant
def requests_of_a_lower_priority_are_waited_for(patch: Patch) -> None:
    original = ReplicaView.seat_seconds
    patch.setattr(ReplicaView, "seat_seconds", lambda self, priority, keeping: original(self, 1 << 30, keeping))


@plant
def memory_of_running_sequences_counts_as_free(patch: Patch) -> None:
    patch.setattr(ReplicaView, "memory_seconds", lambda self, queued, prompt, keeping: 0.0)


@plant
def requests_ahead_need_no_memory(patch: Patch) -> None:
    original = ReplicaView.memory_seconds
    patch.setattr(
        ReplicaView, "memory_seconds", lambda self, queued, prompt, keeping: original(self, 0.0, prompt, keeping)
    )


def check_waits() -> None:
    check_seats(seats=3, running=3, waiting=4, later=2, seconds=5.0, seed=1)
    check_memory(running=6, each=2, free=100, ahead=1, own=1, seconds=5.0, seed=1)


@pytest.mark.parametrize("sow", PLANTS, ids=lambda sow: sow.__name__)
def test_a_planted_bug_of_waiting_is_caught(sow, monkeypatch):
    check_waits()
    sow(monkeypatch)
    with pytest.raises(AssertionError):
        check_waits()


# computing ------------------------------------------------------------------------------------------------------------


def test_what_was_computed_since_the_last_report_is_not_waited_for():
    clock = Hand()
    router = FleetRouter(CELL, SELFISH, clock)
    router.add("a")
    router.report("a", ReplicaLoad(token_seconds=1e-3))
    clock.now = 50.0
    router.assign(router.choose([], 800)[0], [], 800)
    waits = []
    for clock.now in (50.0, 50.3, 50.8, 55.0):
        waits.append(router.choose([], 100)[0].seconds)
    assert waits == pytest.approx([0.9, 0.6, 0.1, 0.1])
    # A report starts the count anew.
    router.report("a", ReplicaLoad(token_seconds=1e-3, prompt_tokens=200))
    assert router.choose([], 100)[0].seconds == pytest.approx(0.7)


def test_a_silent_replica_is_not_taken_for_one_that_has_finished():
    clock = Hand()
    router = FleetRouter(CELL, SELFISH, clock)
    router.add("a")
    router.report("a", ReplicaLoad(token_seconds=1e-3))
    router.assign(router.choose([], 60_000)[0], [], 60_000)
    clock.now = 1e6
    assert router.choose([], 100)[0].seconds > 59.0


def test_a_long_prompt_is_priced_with_its_attention():
    clock = Hand()
    router = FleetRouter(CELL, SELFISH, clock)
    router.add("a")
    router.report("a", ReplicaLoad(token_seconds=1e-4, pair_seconds=1e-8))
    assert router.choose([], 1000)[0].seconds == pytest.approx(0.1 + 0.005)
    assert router.choose([], 100_000)[0].seconds == pytest.approx(10 + 50)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-7), st.integers(0, 1 << 30))
def test_the_costs_of_tokens_and_pairs_are_found_from_steps(token_seconds, pair_seconds, seed):
    costs, random, truth = PromptCosts(), Random(seed), PromptSpeed(token_seconds, pair_seconds)
    for _ in range(60):
        start = random.choice([0, 0, 4000, 50_000])
        work = PromptWork.between(start, start + random.randint(200, 8000))
        costs.computed(int(work.tokens), work.pairs, truth.seconds(work))
    assert costs.token_seconds == pytest.approx(token_seconds, rel=1e-3)
    assert costs.pair_seconds == pytest.approx(pair_seconds, rel=1e-3, abs=1e-6 * token_seconds)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 1e9), st.floats(0, 10)), max_size=40))
def test_no_measured_cost_is_negative(steps):
    costs = PromptCosts()
    for tokens, pairs, seconds in steps:
        costs.computed(tokens, pairs, seconds)
    assert costs.pair_seconds >= 0
    assert costs.token_seconds is None or costs.token_seconds >= 0


# reports --------------------------------------------------------------------------------------------------------------


class LoadedEngine(MirroredEngine):
    """Drops its cache now and then; what is left must be what it reports as held."""

    checked = 0

    def step(self) -> list:
        outputs = super().step()
        load = self.load()
        if self.random.random() < 0.2 and not self.ledger.memory_to_land:
            self.flush()
            arena = self.ledger.arena
            # In units, since slabs may be partly empty. What is reported includes a further cell of each sequence.
            assert sum(arena.used(kind) * size for kind, size in arena.unit_bytes.items()) <= load.held_bytes
            assert load.held_bytes == self.load().held_bytes
            self.checked += bool(load.running)
        return outputs


def test_memory_that_an_engine_reports_as_held_is_what_cannot_be_evicted(monkeypatch):
    monkeypatch.setattr(mirrored, "MirroredEngine", LoadedEngine)
    engines = [mirrored.run_mirrored(random_workload(seed, cache=True), seed) for seed in range(12)]
    assert sum(engine.checked for engine in engines) > 20
    assert any(engine.load().prompt_pairs for engine in engines)
    for engine in engines:
        load = engine.load()
        assert load.held_bytes == 0
        assert load.prompt_pairs >= load.prompt_tokens / 2
        assert load.memory_bytes == engine.ledger.arena.slabs * engine.ledger.arena.slab_bytes


def test_prompts_are_timed_on_a_device_that_computes_while_a_step_is_launched():
    clock, spec = Hand(), rolling_spec()
    device = RollingDevice(spec, 1 << 18, 1)
    launch = device.launch

    def computing(plan: Plan) -> object:
        clock.now += 0.001 * len(plan.tokens)
        return launch(plan)

    device.launch = computing
    config = EngineConfig(
        memory_bytes=1 << 18, max_sequences=1, max_tokens_per_step=128, max_length=600, depth=0, cache=False
    )
    engine = Engine(spec, device, config, now=clock)
    engine.add(Request(np.arange(512, dtype=np.int32) % 90, SamplingParams(max_tokens=1)))
    while not engine.idle:
        engine.step()
    assert engine.load().token_seconds == pytest.approx(0.001, rel=0.05)
