"""Saving costs nothing while memory is free, little when it is short, and never holds up the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.tiers.demotion import ANSWER, PROMPT, ask, engine_with, prompt
from weft.base.sampling import SamplingParams
from weft.device.host_memory import CopyFlight
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.popularity import class_of
from weft.memory.tiers import demotion
from weft.memory.trie import path


def never_wanted(engine: Engine, *kinds: int) -> None:
    """Let the engine have seen a thousand points of each class, of which none was wanted."""
    for kind in kinds:
        for _ in range(1000):
            engine.ledger.cache.valuation.popularity.entered(kind)


def test_prompts_that_no_request_returns_to_are_not_copied_while_memory_is_free() -> None:
    engine, device = engine_with(memory_bytes=1 << 20)
    for number in range(40):
        ask(engine, number)
    assert engine.ledger.cache.counts.evicted_points == 0
    assert device.plans == []


def test_what_is_evicted_was_copied_before_and_is_answered_from_host_memory() -> None:
    engine, device = engine_with(memory_bytes=6 << 10)
    for number in range(12):
        ask(engine, number)
    assert engine.ledger.cache.counts.evicted_points > 0
    saved = sum(len(plan.units) for plan in device.saves)
    reports = [ask(engine, number) for number in range(12)]
    assert sum(report.loaded_tokens for report in reports) > 6 * PROMPT / 2
    # A second eviction of what host memory still has copies nothing.
    again = sum(len(plan.units) for plan in device.saves) - saved
    assert again < saved / 4


def test_many_paths_are_saved_with_one_plan() -> None:
    engine, device = engine_with(memory_bytes=1 << 15)
    for number in range(8):
        ask(engine, number)
    assert not device.saves
    before = len(engine.ledger.cache.trie)
    # From now on, everything that could be evicted is to be saved ahead.
    assert engine.ledger.tiers is not None
    engine.ledger.tiers.links[0].demotion.least_bytes = 1 << 15
    engine.copier.launch()
    assert len(device.saves) == 1
    roots = {path(node)[0].key for node in engine.ledger.cache.trie.nodes.values()}
    assert len(roots) == 8
    engine.copier.finish()
    assert len(engine.ledger.tiers.links[0].lower.trie) >= before - 8


def test_a_step_with_enough_free_memory_examines_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with(memory_bytes=1 << 20)
    examined = []
    monkeypatch.setattr(engine.ledger.cache.valuation, "pop_next", lambda: examined.append(1))
    for number in range(10):
        ask(engine, number)
    assert not examined


def test_paths_of_a_class_that_is_seldom_wanted_are_mostly_not_saved() -> None:
    kinds = [class_of(origin, 0, passes) for origin in Origin for passes in range(3)]
    copied = {}
    for wanted in (True, False):
        engine, device = engine_with(memory_bytes=6 << 10)
        if not wanted:
            never_wanted(engine, *kinds[3:])
        for number in range(40):
            ask(engine, number)
        copied[wanted] = sum(plan.size_bytes for plan in device.saves)
    assert 0 < copied[False] < copied[True] / 2


@pytest.mark.thorough
def test_paths_that_are_seldom_wanted_are_saved_where_copies_cost_less_than_they_save() -> None:
    kinds = [class_of(origin, 0, passes) for origin in Origin for passes in range(3)]
    unworthy = {}
    for copies_bytes in (1e3, 1e12):
        engine, _ = engine_with(memory_bytes=6 << 10)
        never_wanted(engine, *kinds[3:])
        assert engine.ledger.tiers is not None
        link = engine.ledger.tiers.links[0]
        link.rates.load_bytes, link.rates.prefill_tokens = copies_bytes, 1e4
        for number in range(40):
            ask(engine, number)
        unworthy[copies_bytes] = link.demotion.unworthy
    assert unworthy[1e3] > 0
    assert unworthy[1e12] == 0


def test_more_valuable_entries_of_host_memory_are_not_evicted_for_less_valuable_ones() -> None:
    engine, _ = engine_with(memory_bytes=6 << 10, host_bytes=6 << 10)
    for number in range(12):
        ask(engine, number)
    assert engine.ledger.tiers is not None
    host = engine.ledger.tiers.links[0].lower
    points = [node.resume for node in host.trie.nodes.values() if node.resume is not None]
    least = min(map(host.valuation.score, points))
    while host.take_below(Kind.STATE, least) is not None:
        pass
    assert all(point.node.resume is point for point in points)
    assert host.take_below(Kind.STATE, float("inf")) is not None
    assert not all(point.node.resume is point for point in points)


def test_an_engine_whose_copies_do_not_land_still_takes_requests() -> None:
    engine, device = engine_with(memory_bytes=6 << 10)
    for number in range(12):
        ask(engine, number)
    device.copied = lambda ticket, wait: None
    waits = engine.add(Request(prompt(0), SamplingParams(max_tokens=ANSWER)))
    for _ in range(3):
        engine.step()
    assert engine.ledger.tiers.links[0].loads.in_flight
    engine.abort(waits)
    assert [output.sequence for output in engine.step()] == [waits]


def test_a_wait_for_an_event_ends_before_the_event() -> None:
    polls = []
    event = SimpleNamespace(query=lambda: polls.append(1), synchronize=lambda: pytest.fail("waits without a limit"))
    assert CopyFlight((event, event)).landed(wait=True) is None
    assert len(polls) > 1
    polls.clear()
    assert CopyFlight((event, event)).landed(wait=False) is None
    assert len(polls) == 1


def test_the_reserve_follows_what_steps_take() -> None:
    engine, _ = engine_with(memory_bytes=1 << 20)
    assert engine.ledger.tiers is not None
    chosen = engine.ledger.tiers.links[0].demotion
    least = chosen.reserve_bytes
    assert least == int(demotion.LEAST_SHARE * engine.ledger.arena.slabs * engine.ledger.arena.slab_bytes)
    engine.ledger.cache.taken_bytes += 1 << 20
    chosen.note_step()
    assert chosen.reserve_bytes == demotion.STEPS_AHEAD << 20
    for _ in range(5000):
        chosen.note_step()
    assert chosen.reserve_bytes == least
