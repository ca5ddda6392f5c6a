"""Any combination of host memory, a file and a store below the device: the answers are right, and each tier is used."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hashed.chained import layout_of
from tests.support.hashed.remote import FakeStore
from tests.support.models.engines import Ask, model_of, serve, smallest_memory, spec_of, tokens
from tests.support.tiers.below import three_tiers
from tests.support.tiers.disk_blocks import IDENTITY, FlakyBlocks
from tests.support.tiers.host_memory import two_prompts
from tests.support.tiers.remote_tier import finish, save_all
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction, UnitCopy
from weft.base.errors import CopyFailed
from weft.base.options import Options, SizingFacts, resolve
from weft.device.host_memory import HostMemory
from weft.engine.loop import Engine
from weft.memory.kinds import Kind
from weft.memory.tiers.copies import TiersBelow
from weft.memory.tiers.disk.staged_copies import StagedCopies
from weft.runner.runner import Runner


@pytest.fixture(autouse=True)
def every_prompt_is_worth_asking_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.memory.tiers.tiers.LEAST_SECONDS_TO_ASK", 0.0)
    # No test waits for a clock.
    monkeypatch.setattr("weft.memory.tiers.remote.discovery.PATIENCE_SECONDS", 1e9)


# a file and a store -------------------------------------------------------------------------------------------------


def test_what_the_file_got_the_store_gets_too_and_another_machine_loads_it() -> None:
    workload, store = two_prompts(), FakeStore()
    prompt = workload.arrivals[0].prompt
    size = layout_of(workload, 1 << 20).size_bytes
    one = three_tiers(workload, FlakyBlocks(size), store, Random(1))
    finish(one, prompt)
    save_all(one)
    assert one.ledger.tiers is not None
    _, disk, remote = one.ledger.tiers.links
    assert disk.saves.bytes == remote.saves.bytes > 0
    other = three_tiers(workload, FlakyBlocks(size), store, Random(2))
    assert other.ledger.tiers is not None
    report = finish(other, prompt)
    assert (report.loaded_tokens, report.disk_tokens, report.remote_tokens) == (12, 0, 12)
    assert [link.loaded_tokens for link in other.ledger.tiers.links] == [0, 0, 12]
    # What its own file has, it does not ask the store for.
    save_all(other)
    other.ledger.cache.clear()
    other.ledger.tiers.links[0].lower.clear()
    other.ledger.tiers.links[2].lower.clear()
    asked = store.calls.count("has")
    assert finish(other, prompt).disk_tokens == 12
    assert store.calls.count("has") == asked
    one.close()
    other.close()


def test_a_store_beside_a_file_gets_what_the_file_got_also_while_steps_run_and_nothing_else() -> None:
    workload, store = two_prompts(), FakeStore()
    engine = three_tiers(workload, FlakyBlocks(layout_of(workload, 1 << 20).size_bytes), store, Random(3))
    finish(engine, workload.arrivals[0].prompt)
    save_all(engine)
    assert engine.ledger.tiers is not None
    host, disk, remote = engine.ledger.tiers.links
    remote.lower.clear()
    disk.lower.clear()
    # As if host memory were about to evict everything.
    for link in (disk, remote):
        link.demotion.least_bytes = 1 << 40
    assert remote.plan_save() is None
    (end,) = [node for node in host.lower.trie.nodes.values() if not node.children]
    disk.saves.saved(end.key)
    plan = remote.plan_save()
    assert plan is not None
    assert end.key in [label.key for label in plan.labels]
    remote.failed(plan)
    engine.close()


def test_a_file_and_a_store_are_accepted_together_and_on_a_gpu_without_host_memory() -> None:
    facts = SizingFacts(1 << 30, None, lambda size: size, 1)
    options = Options(disk="tier", disk_size="1GiB", remote="s3://bucket/prefix")
    for each in (facts, replace(facts, device="cuda", free_host_bytes=1 << 34)):
        config, _ = resolve(options, each)
        assert config.disk_bytes == 1 << 30
        assert config.remote
        assert config.host_bytes == 0


# through a little memory --------------------------------------------------------------------------------------------


def test_a_model_is_answered_from_a_file_through_a_little_memory(tmp_path: Path) -> None:
    prompts = [tokens(300 + 10 * seed, seed) for seed in range(2)]
    answers = []
    for _ in range(2):
        engine = staged_engine("falcon_h1", tmp_path / "tier")
        asked = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
        answers.append([each.tokens for each in asked])
        engine.close()
    assert answers[0] == answers[1]
    assert sum(each.report.disk_tokens for each in asked) > 256


def staged_engine(family: str, path: Path) -> Engine:
    spec, memory = spec_of(family), smallest_memory(family, 420, 4)
    config = EngineConfig(
        memory_bytes=memory, disk_bytes=16 << 20, max_sequences=4, max_tokens_per_step=512, max_length=420
    )
    runner = Runner(model_of(family), spec, memory, config.max_sequences, threads=1)
    unreached = SimpleNamespace(unit_bytes=runner.store.unit_bytes, memory=None)
    runner.tiers = TiersBelow(spec, unreached, partial(HostMemory, runner.store))
    runner.tiers.add_disk(path, config.disk_bytes, IDENTITY)
    return Engine(spec, runner, config)


class Halves:
    """Copies that land, or fail, when the test says so."""

    def __init__(self) -> None:
        self.begun: list[CopyPlan] = []
        self.landed: set[int] = set()
        self.fails = False

    def copy(self, plan: CopyPlan) -> CopyPlan:
        self.begun.append(plan)
        return plan

    def copied(self, plan: CopyPlan, wait: bool) -> float | None:
        if self.fails:
            raise CopyFailed("no room")
        return 1.0 if plan.number in self.landed else None


def staged_plans(*numbers: int) -> tuple[StagedCopies, Halves, Halves, list[Any]]:
    host, inner = Halves(), Halves()
    copies = StagedCopies(host, inner, {Kind.PAGE: 10, Kind.STATE: 7}, 64)
    units = tuple(UnitCopy(kind, 3, 4) for kind in ("page", "state", "page"))
    plans = [CopyPlan(number, Direction.SAVE, units if number else (), 27) for number in numbers]
    return copies, host, inner, [copies.copy(plan) for plan in plans]


def test_plans_wait_for_a_slot_and_reach_the_tier_below_in_their_order() -> None:
    copies, host, inner, flights = staged_plans(1, 2, 3, 0)
    assert [plan.number for plan in host.begun] == [1, 2]
    host.landed |= {2}
    assert copies.copied(flights[0], wait=False) is None
    assert inner.begun == []
    host.landed |= {1}
    assert copies.copied(flights[0], wait=False) is None
    assert [plan.number for plan in inner.begun] == [1, 2]
    inner.landed |= {1, 2, 0}
    assert copies.copied(flights[0], wait=False) == 2.0
    # It has the slot of the first one.
    assert [plan.number for plan in host.begun] == [1, 2, 3]
    assert copies.copied(flights[3], wait=False) is None
    host.landed.add(3)
    inner.landed.add(3)
    assert [copies.copied(flight, wait=False) for flight in flights[1:]] == [2.0, 2.0, 1.0]
    assert [plan.number for plan in inner.begun] == [1, 2, 3, 0]


def test_units_of_two_plans_never_share_bytes_of_the_memory_that_they_pass_through() -> None:
    _, host, _, _ = staged_plans(1, 2)
    sizes = {"page": 10, "state": 7}
    taken = sorted((u.lower * sizes[u.kind], (u.lower + 1) * sizes[u.kind]) for p in host.begun for u in p.units)
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


def test_a_copy_that_fails_gives_its_slot_back() -> None:
    copies, host, _, flights = staged_plans(1, 2, 3)
    host.fails = True
    for flight in flights:
        with pytest.raises(CopyFailed):
            copies.copied(flight, wait=False)
    assert [plan.number for plan in host.begun] == [1, 2, 3]


def test_a_copy_that_has_ended_may_be_asked_for_again() -> None:
    """A group of ranks asks until the last rank has made its copies."""
    copies, host, inner, (flight, failed) = staged_plans(1, 2)
    host.landed.add(1)
    inner.landed.add(1)
    assert [copies.copied(flight, wait=True) for _ in range(2)] == [2.0, 2.0]
    host.fails = True
    for _ in range(2):
        with pytest.raises(CopyFailed):
            copies.copied(failed, wait=True)


def test_one_thread_begins_copies_while_another_asks_for_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank, steps and copies begin in one thread, and another reports copies that have landed."""
    copies, host, _, (flight,) = staged_plans(1)
    plan, landed, threads = flight.plan, host.copied, list[Thread]()

    def begin_meanwhile(ticket: CopyPlan, wait: bool) -> float | None:
        if not threads:
            threads.append(Thread(target=copies.copy, args=(replace(plan, number=2),)))
            threads[0].start()
            # While a reporter waits, copies begin; while it moves plans, they do not.
            threads[0].join(60 if wait else 0.2)
            assert threads[0].is_alive() is not wait
        return landed(ticket, wait)

    monkeypatch.setattr(host, "copied", begin_meanwhile)
    for wait in (True, False):
        assert copies.copied(flight, wait) is None
        threads.pop().join()
    assert [each.number for each in host.begun] == [1, 2]
