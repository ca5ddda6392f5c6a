"""Whatever is saved, loaded, evicted, cancelled, aborted or preempted: the answers are the oracle's."""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import parts, thorough
from tests.support.hashed.rolling import VOCABULARY
from tests.support.hashed.tiered import TieredDevice, run_tiered, tiered_workload
from tests.support.models.engines import Ask, model_of, serve, smallest_memory, spec_of, tokens
from tests.support.tiers.host_memory import engine_and_device, finish, two_prompts
from weft.base.config import EngineConfig
from weft.base.copies import Direction
from weft.base.errors import InvalidOption
from weft.base.options import Options, SizingFacts, resolve
from weft.base.retain import Retain
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.misses import Reason
from weft.runner.runner import Runner

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "38"))
PARTS = 6


@pytest.mark.parametrize("part", parts(PARTS))
def test_every_answer_is_the_oracles_with_host_memory(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10))
    def check(seed: int, count: int) -> None:
        seed = seed * PARTS + part
        run_tiered(tiered_workload(seed, count), seed)

    check()


def tiered_engine(family: str, length: int, **settings: object) -> Engine:
    """An engine on a tiny model whose device memory holds one sequence, with host memory for many."""
    spec = spec_of(family)
    options = {"max_sequences": 4, "max_tokens_per_step": 512, "max_length": length, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=smallest_memory(family, length, 4), host_bytes=64 << 20, **options)
    runner = Runner(model_of(family), spec, config.memory_bytes, config.max_sequences, threads=1)
    runner.tiers.add_host_memory(config.host_bytes)
    return Engine(spec, runner, config)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "lfm2", "gemma3", "llama"])
def test_a_prefix_that_the_device_evicted_is_answered_from_host_memory(family: str, depth: int) -> None:
    engine = tiered_engine(family, 420, depth=depth)
    prompts = [tokens(300 + 10 * seed, seed) for seed in range(6)]
    first = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    again = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    assert [a.tokens for a in again] == [a.tokens for a in first]
    # Of a prompt, some states may not have been kept, and the device still has a little.
    assert all(a.report.cached_tokens >= 192 for a in again)
    assert sum(a.report.loaded_tokens for a in again) > 256
    for a, b in zip(first, again, strict=True):
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 1e-5


class Kept(Ask):
    """A request that retains its prompt and its answer."""

    def request(self) -> Request:
        return msgspec.structs.replace(super().request(), retain=(Retain(1000.0),))


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3"])
def test_a_retained_prefix_moves_to_host_memory_when_others_need_its_place(family: str) -> None:
    engine = tiered_engine(family, 420, retain_share=0.9)
    kept = tokens(300, 1)
    first = serve(engine, [Kept(kept)])[0]
    assert engine.stats()["retained"]["count"] > 0
    serve(engine, [Ask(tokens(400, seed)) for seed in (2, 3)])
    retained = engine.stats()["retained"]
    assert retained["moved"] > 0
    assert retained["given_up"] == 0
    again = serve(engine, [Ask(kept)])[0]
    assert again.tokens == first.tokens
    assert again.report.loaded_tokens > 0
    assert max(abs(x - y) for x, y in zip(first.logprobs, again.logprobs, strict=True)) < 1e-5


def test_a_request_starts_although_its_prefix_is_scattered_over_all_slabs() -> None:
    """Then no slab is left for its tail, and nothing can be evicted but the prefix itself."""
    spec, memory, host = spec_of("nemotron_h"), 743_036, 1 << 22
    sizes = {"memory_bytes": memory, "host_bytes": host, "max_sequences": 8, "max_length": 420, "depth": 0}
    engine = Engine(
        spec, TieredDevice(spec, memory, 8, False, host, Random(4)), EngineConfig(max_tokens_per_step=512, **sizes)
    )
    asks = [Ask([token % VOCABULARY for token in tokens(300 + 10 * seed, seed)]) for seed in range(6)]
    for ask in (*asks, *asks):
        serve(engine, [ask])
    serve(engine, [replace(ask, step=step) for step, ask in enumerate(asks)])


def test_a_request_whose_prefix_is_on_its_way_waits_and_others_run() -> None:
    workload = two_prompts()
    engine, device = engine_and_device(workload)
    for _ in range(2):
        finish(engine, workload.arrivals[0].prompt)
        finish(engine, workload.arrivals[1].prompt)
    device.patience = 0.0
    waits = engine.add(Request(np.array(workload.arrivals[0].prompt, np.int32), SamplingParams(max_tokens=3)))
    runs = engine.add(Request(np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=3)))
    seen: list[int] = []
    while not engine.idle:
        seen += [output.sequence for output in engine.step() if output.token is not None]
    assert seen == [runs] * 3 + [waits] * 3
    assert engine.report(waits).loaded_tokens > 0


def test_a_load_slower_than_computing_is_a_miss_with_that_reason() -> None:
    workload = two_prompts()
    engine, _ = engine_and_device(workload)
    for _ in range(2):
        finish(engine, workload.arrivals[0].prompt)
        finish(engine, workload.arrivals[1].prompt)
    assert engine.ledger.tiers is not None
    rates = engine.ledger.tiers.links[0].rates
    rates.load_bytes, rates.prefill_tokens = 1.0, 1e9
    report = finish(engine, workload.arrivals[0].prompt)
    assert report.loaded_tokens == 0
    assert report.miss is not None
    assert report.miss.reason is Reason.LOAD_SLOWER


def test_a_load_that_no_request_waits_for_is_cancelled() -> None:
    workload = two_prompts()
    engine, device = engine_and_device(workload)
    for _ in range(2):
        finish(engine, workload.arrivals[0].prompt)
        finish(engine, workload.arrivals[1].prompt)
    assert engine.ledger.tiers is not None
    loads = engine.ledger.tiers.links[0].loads
    loads.chunk_bytes = loads.most_bytes = 1
    before, device.patience = device.copied_units[Direction.LOAD], 0.0
    number = engine.add(Request(np.array(workload.arrivals[0].prompt, np.int32), SamplingParams(max_tokens=3)))
    engine.step()
    engine.abort(number)
    while not engine.idle:
        engine.step()
    assert loads.cancelled == 1
    assert device.copied_units[Direction.LOAD] - before <= 2
    engine.ledger.cache.clear()
    assert engine.ledger.arena.used_slabs == 0


def test_a_load_waits_for_memory_that_a_copy_is_about_to_free(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = two_prompts()
    engine, _ = engine_and_device(workload)
    for _ in range(2):
        finish(engine, workload.arrivals[0].prompt)
        finish(engine, workload.arrivals[1].prompt)
    assert engine.ledger.tiers is not None
    loads = engine.ledger.tiers.links[0].loads
    number = engine.add(Request(np.array(workload.arrivals[0].prompt, np.int32), SamplingParams(max_tokens=3)))
    with monkeypatch.context() as patch:
        patch.setattr(loads, "frees_memory", lambda: True)
        patch.setattr("weft.memory.tiers.loads.take", lambda cache, kind: None)
        for _ in range(3):
            engine.step()
        assert loads.waiting
        assert loads.cancelled == 0
    while not engine.idle:
        engine.step()
    assert engine.report(number).loaded_tokens > 0


def test_host_memory_is_refused_on_a_cpu_and_without_a_cache() -> None:
    facts = SizingFacts(1 << 30, None, lambda size: size, 1)
    with pytest.raises(InvalidOption, match="host_memory needs a GPU"):
        resolve(Options(host_memory="1GiB"), facts)
    gpu = replace(facts, device="cuda", free_host_bytes=1 << 34)
    with pytest.raises(InvalidOption, match="host_memory needs the cache"):
        resolve(Options(host_memory="1GiB", cache=False), gpu)
    assert resolve(Options(host_memory="auto"), gpu)[0].host_bytes == 1 << 33
    assert resolve(Options(host_memory="1GiB"), gpu)[0].host_bytes == 1 << 30
    assert resolve(Options(), gpu)[0].host_bytes == 0
