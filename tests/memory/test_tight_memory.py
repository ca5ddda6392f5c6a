"""When memory is tight: what is cached and what is optional never costs a running request its memory."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.caching import LINES, SHARES, SIZES, traffic
from tests.support.fences import ROOT
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.arena import Arena, choose_slab_bytes
from weft.memory.audit import audit
from weft.memory.captures import CaptureReasons
from weft.memory.keys import PrefixIdentity
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.lease import Lease
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.models import configurations
from weft.models.shapes import shape_of
from weft.simulate.costs import cost_model
from weft.simulate.oracle import survey
from weft.simulate.setup import SimulationSetup, Traffic, run

CELL = 4
TRACES = ROOT / "benchmarks" / "traces"


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 90, length).astype(np.int32)


def make(slabs: int, **settings: object) -> Ledger:
    """A ledger whose slabs hold one state or eight pages."""
    return Ledger(rolling_spec(heavy=True), slabs * 1024, seats=4, max_length=4000, **settings)


def begin(target: Ledger, seat: int, tokens: np.ndarray, prompt: int | None = None) -> Lease:
    prompt = len(tokens) if prompt is None else prompt
    lease = target.open(seat, PrefixIdentity(CELL).keys(tokens), prompt, prompt - 1)
    assert lease is not None
    return lease


def go_on(target: Ledger, lease: Lease, end: int) -> bool:
    """One step of a lease alone; False if there is no memory for it."""
    if target.advance(lease, end) is None:
        return False
    target.settle(lease, target.snapshot([lease])[lease.seat], end)
    audit(target)
    return True


def finish(target: Ledger, tokens: np.ndarray) -> None:
    """Compute a prompt in one step, and leave."""
    lease = begin(target, 0, tokens)
    assert go_on(target, lease, len(tokens))
    target.close(lease)


# slabs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nemotron-nano-9b-v2", "qwen3-next-mini", "falcon-h1-7b", "granite-4.0-h-small"])
def test_a_heavy_state_that_is_given_up_leaves_a_slab_that_any_kind_can_use(name):
    spec = MemorySpec(shape_of(configurations.find(name)).memories)
    sizes = unit_bytes(spec)
    assert choose_slab_bytes(sizes, 40 << 30) == spec.state_bytes
    arena = Arena(sizes, 20 * spec.state_bytes)
    states = []
    while (slot := arena.take(Kind.STATE)) is not None:
        states.append(slot)
    for kind in (Kind.PAGE, Kind.TAIL):
        assert arena.take(kind) is None
        arena.release(Kind.STATE, states.pop(7))
        assert arena.take(kind) is not None


# snapshots and rows ---------------------------------------------------------------------------------------------------


def test_snapshots_come_after_the_memory_of_every_row_of_the_step():
    """Two prompts that fill memory together: the first one's candidates would take what the second one needs."""
    target = make(slabs=20)
    leases = [begin(target, seat, text(seat, 200)) for seat in range(2)]
    assert all(target.advance(lease, 200) is not None for lease in leases)
    grants = target.snapshot(leases)
    audit(target)
    for lease in leases:
        target.settle(lease, grants[lease.seat], 200)
    assert target.cache.counts.captures_kept > len(leases)


def test_a_step_that_is_short_of_memory_keeps_only_checkpoints_that_it_writes_anyway():
    target = make(slabs=40)
    lease = begin(target, 0, text(0, 101))
    assert target.advance(lease, 100) is not None
    grant = target.snapshot([lease], spare=False)[0]
    assert [(c.position, c.own, c.keep) for c in grant.captures] == [(100, True, True)]


def test_a_request_that_waits_in_the_same_step_gets_the_state_that_it_asks_for():
    target = make(slabs=60, captures=CaptureReasons(candidates=False, regular=False))
    first, second = text(1, 90), np.concatenate([text(1, 60), text(2, 40)])
    lease = begin(target, 0, first)
    assert target.advance(lease, 90) is not None
    keys = PrefixIdentity(CELL).keys(second)
    # The step is planned already, but its snapshots are not decided yet.
    assert target.expects(keys, target.match(keys, 99), 99)
    target.settle(lease, target.snapshot([lease])[0], 90)
    assert target.match(keys, 99).cached == 60


def test_a_lone_sequence_leaves_its_cell_although_pages_lie_in_every_other_slab():
    target = make(slabs=12)
    # One page in each of nine slabs; the tail and its own checkpoint have the others but one.
    pages = [target.arena.take(Kind.PAGE) for _ in range(9 * 8)]
    for page in pages:
        if page % 8:
            target.arena.release(Kind.PAGE, page)
    lease = begin(target, 0, text(0, 60))
    for end in range(CELL, 60, CELL):
        assert target.advance(lease, end) is not None
        target.settle(lease, target.snapshot([lease])[0], end)
    target.close(lease)
    assert target.snapshots.reserve is None


# admission ------------------------------------------------------------------------------------------------------------


def test_admission_counts_the_cached_paths_that_running_sequences_read_from():
    target = make(slabs=22)
    shared = text(1, 400)
    finish(target, shared)
    other = PrefixIdentity(CELL).keys(text(2, 200))
    assert target.room_for(other, 0, 200) is not None
    lease = begin(target, 0, np.concatenate([shared, text(3, 8)]))
    assert lease.shared >= 90
    # Nothing was computed yet, but 96 of its cells are pinned: 12 slabs of 22.
    assert target.room_for(other, 0, 200) is None
    target.close(lease)
    assert target.cache.trie.held == 0
    assert target.room_for(other, 0, 200) is not None


def test_paths_that_several_sequences_share_count_once():
    target = make(slabs=40)
    shared = text(1, 200)
    finish(target, shared)
    leases = [begin(target, seat, np.concatenate([shared, text(5 + seat, 8)])) for seat in range(3)]
    assert target.cache.trie.held == max(lease.shared for lease in leases)
    for lease in leases:
        target.close(lease)
    assert target.cache.trie.held == 0


def test_what_a_waiting_request_will_resume_from_goes_last():
    kept = {}
    for awaited in (False, True):
        target = make(slabs=24, captures=CaptureReasons(candidates=False, regular=False))
        first = text(1, 100)
        finish(target, first)
        keys = PrefixIdentity(CELL).keys(first)
        for seed in range(10, 40):
            target.keep_for([1] if awaited else [], [(keys, 99)] if awaited else [])
            finish(target, text(seed, 100))
        kept[awaited] = target.match(keys, 99).cached
    assert kept == {False: 0, True: 96}


@pytest.mark.parametrize("slabs", [12, 13])
def test_rows_wait_for_states_that_are_about_to_land_instead_of_giving_way(slabs):
    """All sequences leave their cells in the same step, each into a new slot, and there is one to spare."""
    spec, memory = rolling_spec(heavy=True), slabs * 1024
    config = EngineConfig(memory_bytes=memory, max_sequences=4, max_tokens_per_step=64, max_length=80)
    engine = Engine(spec, RollingDevice(spec, memory, 4), config)
    for seed in range(4):
        engine.add(Request(text(seed, 6), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    while not engine.idle:
        engine.step()
    assert engine.planner.preemptions == 0


# time to the first token ----------------------------------------------------------------------------------------------


def first_tokens(sent: Traffic, memory: float, model: str = "qwen3-next-mini", **more: object) -> list[list[float]]:
    """Median and 90th percentile under the default and under LRU."""
    cost, known = cost_model(model), survey(sent.sessions(64), 64)
    found = [run(SimulationSetup(sent, cost, memory, policy, surveyed=known, **more)) for policy in ("value", "lru")]
    return [[each.first_token(share) for share in (0.5, 0.9)] for each in found]


def assert_no_worse(sent: Traffic, memory: float, **more: object) -> None:
    value, lru = first_tokens(sent, memory, **more)
    for ours, theirs in zip(value, lru, strict=True):
        assert ours <= 1.05 * theirs, f"{sent.name} in {memory:.0%} of the working set: {value} against {lru} s"


@pytest.mark.thorough
def test_where_requests_wait_for_memory_the_default_is_no_slower_than_lru():
    assert_no_worse(Traffic("system-prompts", 250), 0.04)


@pytest.mark.thorough
def test_strides_cost_what_their_steps_would():
    """A prompt that is admitted is computed once, however many tokens decodes take at a time."""
    sent = Traffic("system-prompts", 80)
    known = survey(sent.sessions(64), 64)
    setups = [
        SimulationSetup(sent, cost_model("qwen3-next-mini"), 0.1, surveyed=known, stride=stride) for stride in (1, 64)
    ]
    single, strided = (run(each) for each in setups)
    assert strided.busy_seconds == pytest.approx(single.busy_seconds, rel=0.1)
    assert strided.first_token(0.5) == pytest.approx(single.first_token(0.5), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory"), list(product((*SIZES, *LINES), SHARES)))
def test_the_default_is_no_slower_than_lru_on_what_was_held_out(name, memory):
    assert_no_worse(traffic(name, str(TRACES), "held-out"), memory)
