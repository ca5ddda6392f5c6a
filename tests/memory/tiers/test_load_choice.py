"""What a request loads and what it computes: of several resume points the one that saves most, and no load for ever."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.support.tiers.chain import chain_of_two, missing, save_all
from tests.support.tiers.host_memory import engine_and_device, finish, two_prompts
from tests.support.tiers.load_choice import check_second_turns, tiers_of
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.tiers.load_choice import PATIENCE_SECONDS
from weft.memory.tiers.rates import Rates, load_pays


def two_ends() -> tuple[Engine, list[int], list[int]]:
    """A prompt in host memory, and one that continues it in the file; the device has nothing."""
    engine, _, (prompt, _) = chain_of_two()
    longer = [*prompt, *prompt[:8]]
    finish(engine, prompt)
    save_all(engine)
    finish(engine, longer)
    save_all(engine)
    engine.ledger.cache.clear()
    tiers_of(engine).links[0].lower.clear()
    finish(engine, prompt)
    engine.ledger.cache.clear()
    return engine, prompt, longer


def test_a_point_in_the_file_is_not_loaded_if_computing_the_rest_from_one_in_host_memory_is_faster() -> None:
    engine, _, longer = two_ends()
    tiers = tiers_of(engine)
    host, disk = tiers.links
    keys = list(disk.lower.trie.nodes)
    for link in tiers.links:
        link.rates.prefill_tokens = 1e3
    host.rates.load_bytes = disk.rates.load_bytes = 1e12
    far, near = tiers.find(keys, 24, missing(24))
    assert (far.level, near.level) == (1, 0)
    assert far.tokens > near.tokens > 0
    # Loading from the file takes half as long as computing all of it, but longer than computing what is missing.
    disk.rates.load_bytes = disk.load_bytes(keys, far.node) / (far.tokens / 2e3)
    near_now, far_now = tiers.find(keys, 24, missing(24))
    assert far_now.pays
    assert (near_now.level, far_now.level) == (0, 1)
    report = finish(engine, longer)
    assert report.disk_tokens == 0
    assert report.loaded_tokens == near.tokens
    engine.close()


def test_a_state_is_loaded_alone_where_pages_are_on_the_device_and_more_pages_are_too_slow() -> None:
    engine, prompt, _ = two_ends()
    tiers = tiers_of(engine)
    finish(engine, prompt)
    device = engine.ledger.cache
    for node in list(device.trie.nodes.values()):
        device.drop_point(node)
    tiers.links[0].lower.clear()
    keys = list(tiers.links[1].lower.trie.nodes)
    for link in tiers.links:
        link.rates.prefill_tokens, link.rates.load_bytes = 1e3, 1e12
    deep, alone = tiers.find(keys, 24, missing(24))
    assert deep.tokens > alone.tokens > 0
    on_device = device.trie.deepest(keys)
    assert on_device is not None
    assert alone.node.depth <= on_device.depth
    engine.close()


def test_a_load_that_becomes_slower_than_computing_is_given_up() -> None:
    workload = two_prompts()
    engine, device = engine_and_device(workload)
    prompts = [arrival.prompt for arrival in workload.arrivals]
    for prompt in prompts * 2:
        finish(engine, prompt)
    tiers = tiers_of(engine)
    [host] = tiers.links
    host.loads.chunk_bytes = host.loads.most_bytes = 1
    tiers.clock = lambda: 0.0
    host.rates.load_bytes, host.rates.prefill_tokens = 1e12, 1e3
    device.patience = 0.0
    number = engine.add(Request(np.array(prompts[0], np.int32), SamplingParams(max_tokens=3)))
    engine.add(Request(np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=8)))
    engine.step()
    assert tiers.given_up == 0
    assert host.loads.in_flight
    host.rates.load_bytes = 1.0
    while not engine.idle:
        engine.step()
    assert tiers.given_up == 1
    assert host.loads.cancelled == 1
    assert engine.report(number).loaded_tokens == 0


@pytest.mark.parametrize(("hangs", "given_up"), [(0.9 * PATIENCE_SECONDS, 0), (1.1 * PATIENCE_SECONDS, 1)])
def test_a_load_without_progress_is_given_up(hangs: float, given_up: int) -> None:
    workload = two_prompts()
    engine, device = engine_and_device(workload)
    prompts = [arrival.prompt for arrival in workload.arrivals]
    tiers, now = tiers_of(engine), 100.0
    tiers.clock = lambda: now
    for prompt in prompts * 2:
        finish(engine, prompt)
    tiers.links[0].rates.prefill_tokens = 1e3
    device.patience = 0.0
    number = engine.add(Request(np.array(prompts[0], np.int32), SamplingParams(max_tokens=3)))
    engine.add(Request(np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=8)))
    engine.step()
    now += hangs
    engine.step()
    assert tiers.given_up == given_up
    while not engine.idle:
        engine.step()
    assert (engine.report(number).loaded_tokens > 0) == (not given_up)


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    rates = Rates(1e9, 1e3)
    for _ in range(40):
        rates.loaded(1 << 21, 1.0)
    slow = rates.load_bytes
    assert slow is not None
    assert slow < 1e7
    declined = 0
    while declined < 100 and not load_pays(rates.load_seconds(10 << 20), rates.compute_seconds(1000)):
        rates.declined()
        declined += 1
    assert 10 < declined < 100


def test_an_engine_raises_the_rate_of_a_tier_whose_loads_it_declines() -> None:
    workload, random = two_prompts(), Random("slow")
    engine, _ = engine_and_device(workload)
    prompts = [arrival.prompt for arrival in workload.arrivals]
    for prompt in prompts * 2:
        finish(engine, prompt)
    rates = tiers_of(engine).links[0].rates
    rates.load_bytes, rates.prefill_tokens = 1.0, 1e9
    finish(engine, random.choice(prompts[:1]))
    assert rates.load_bytes > 1.0


def test_of_many_requests_that_wait_for_loads_few_are_computed() -> None:
    check_second_turns()
