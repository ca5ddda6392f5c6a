"""The cache report tells what the cache holds: checked by counting the trie and the leases another way."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.workloads import random_workload, run_workload
from tests.support.servers.http_server import serving
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.audit import audit
from weft.memory.kinds import Kind
from weft.memory.misses import Reason
from weft.memory.report import MAX_POINTS, cache_report, memory_stats, units_in_use
from weft.memory.trie import path
from weft.server.settings import ServerSettings

MEMORY = 1 << 16


def make(memory: int = MEMORY, heavy: bool = False, **settings: object) -> Engine:
    options = {"max_sequences": 4, "max_tokens_per_step": 32, "max_length": 200, "paranoid": True} | settings
    spec = rolling_spec(heavy=heavy)
    return Engine(
        spec, RollingDevice(spec, memory, options["max_sequences"]), EngineConfig(memory_bytes=memory, **options)
    )


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, count).tolist()


def ask(engine: Engine, prompt: list[int], count: int = 1, **more: object) -> int:
    params = SamplingParams(max_tokens=count, temperature=0.0)
    return engine.add(Request(np.array(prompt, np.int32), params, **more))


def answer(engine: Engine, prompt: list[int], count: int = 1, **more: object) -> None:
    ask(engine, prompt, count, **more)
    while not engine.idle:
        engine.step()


def test_a_shared_prefix_is_told_with_its_length_its_hits_and_its_resume_points() -> None:
    engine = make(heavy=True, capture_every=8192)  # and so no candidates
    cell = engine.ledger.spec.cell
    stem = tokens(4 * cell, 1)
    for seed in range(5):
        answer(engine, stem + tokens(cell + 3, 10 + seed))
    answer(engine, tokens(2 * cell, 99))
    first = cache_report(engine.ledger, 10)["prefixes"][0]
    assert first["tokens"] == 4 * cell
    # The second request finds where they part; from the third on they resume there.
    assert first["hits"] == 3
    assert first["saved_tokens"] == 3 * 4 * cell
    assert first["sequences"] == first["children"] == 5
    assert first["running"] == 0
    # The clock ticks at every start: the point was taken before the last hit's own, its cell was left after it.
    assert first["resume_points"][0] == {"tokens": 4 * cell, "hits": 3, "age": 2}
    assert first["age"] == 1
    assert first["bytes"]["page"] == 4 * engine.ledger.arena.unit_bytes[Kind.PAGE]


def test_prefixes_come_in_the_order_of_what_they_saved() -> None:
    engine = make()
    cell = engine.ledger.spec.cell
    for length, hits in ((2, 6), (6, 1), (4, 4)):
        for _ in range(hits + 1):
            answer(engine, tokens(length * cell + 1, length))
    found = cache_report(engine.ledger, 10)["prefixes"]
    assert [prefix["tokens"] // cell for prefix in found] == [4, 2, 6]
    assert [prefix["saved_tokens"] for prefix in found] == sorted((p["saved_tokens"] for p in found), reverse=True)


def test_the_report_is_bounded_however_large_the_cache() -> None:
    engine = make(memory=1 << 20, max_length=2000, max_tokens_per_step=512)
    cell = engine.ledger.spec.cell
    for seed in range(30):
        for _ in range(2):
            answer(engine, tokens(2 * cell + 1, seed))
    long = tokens(120 * cell + 1, 77)
    answer(engine, long), answer(engine, long)
    assert len(cache_report(engine.ledger, 7)["prefixes"]) == 7
    assert cache_report(engine.ledger, 0)["prefixes"] == []
    assert cache_report(engine.ledger, -1)["prefixes"] == []
    deep = cache_report(engine.ledger, 1)["prefixes"][0]
    assert deep["resume_point_count"] > MAX_POINTS == len(deep["resume_points"])


def test_no_prompt_can_be_read_from_the_report() -> None:
    """Only the beginnings of salted keys, lengths and counts: two tenants with one prompt cannot be told to have it."""
    engine = make()
    cell = engine.ledger.spec.cell
    for salt in (b"one", b"two"):
        for _ in range(2):
            answer(engine, tokens(3 * cell + 1, 5), salt=salt)
    report = cache_report(engine.ledger, 10)
    names = [prefix["name"] for prefix in report["prefixes"]]
    assert len(names) == len(set(names)) == 2
    allowed = (str, int, bool)

    def check(value: object) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                assert isinstance(each, dict), "a bare list could be tokens"
                check(each)
        else:
            assert isinstance(value, allowed)

    check(report)
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in names)


def test_live_and_cached_units_add_up_to_those_in_use() -> None:
    """At every step of random workloads, against a count of the leases' own tables."""

    class Counted(Engine):
        checked = 0

        def step(self):
            outputs = super().step()
            ledger = self.ledger
            found = units_in_use(ledger)
            pages = {p for s, lease in ledger.leases.items() for p in ledger.page_table[s, : lease.cells].tolist()}
            pinned = {n.page for lease in ledger.leases.values() for n in path(lease.node)}
            assert pinned <= pages
            if Kind.PAGE in ledger.arena.unit_bytes:
                assert found["page"]["live"] == len(pages)
            for kind, uses in found.items():
                assert uses["live"] >= 0 <= uses["cached"], (kind, uses)
                assert sum(uses.values()) == ledger.arena.used(Kind(kind))
            if "tail" in found:
                assert found["tail"] == {"live": len(ledger.leases), "cached": 0}
            points = sum(node.resume is not None for node in ledger.cache.trie.nodes.values())
            assert memory_stats(ledger)["resume_points"] == points
            Counted.checked += 1
            return outputs

    for seed in range(6):
        run_workload(random_workload(seed), Counted)
    assert Counted.checked > 100


def test_a_quiet_engine_holds_nothing_live_and_an_emptied_one_nothing_at_all() -> None:
    engine = make()
    answer(engine, tokens(30, 1), 5)
    assert all(uses["live"] == 0 for uses in units_in_use(engine.ledger).values())
    assert sum(uses["cached"] for uses in units_in_use(engine.ledger).values()) > 0
    assert engine.flush() == 0
    assert all(uses == {"live": 0, "cached": 0} for uses in units_in_use(engine.ledger).values())
    assert memory_stats(engine.ledger)["cells"] == memory_stats(engine.ledger)["slabs_used"] == 0
    audit(engine.ledger)


def test_misses_are_counted_by_reason_with_the_tokens_that_they_cost() -> None:
    engine = make()
    cell = engine.ledger.spec.cell
    prompt = tokens(3 * cell + 1, 1)
    answer(engine, prompt)
    answer(engine, prompt)
    answer(engine, tokens(cell - 1, 2))
    answer(engine, prompt, salt=b"other")
    stats = memory_stats(engine.ledger)
    assert set(stats["misses"]) == {reason.value for reason in Reason}
    expected = {"never_computed": 1, "nothing_more": 1, "below_grid": 1, "other_salt": 1}
    assert {reason: count for reason, count in stats["misses"].items() if count} == expected
    lost = {reason: count for reason, count in stats["lost_tokens"].items() if count}
    assert lost == dict.fromkeys(("never_computed", "other_salt"), 3 * cell)
    assert stats["cached_tokens"] == 3 * cell
    assert stats["reusable_tokens"] == 3 * 3 * cell
    assert stats["lookups"] == 4


def test_a_cache_that_is_off_says_so() -> None:
    engine = make(cache=False)
    prompt = tokens(3 * engine.ledger.spec.cell + 1, 1)
    answer(engine, prompt), answer(engine, prompt)
    assert memory_stats(engine.ledger)["misses"]["cache_off"] == 2
    assert cache_report(engine.ledger, 5)["enabled"] is False


def test_a_sequence_that_gave_way_is_not_counted_as_a_second_request() -> None:
    for seed in range(40):
        workload = random_workload(seed, count=8)
        engines: list[Engine] = []

        class Kept(Engine):
            def __init__(self, *args: object) -> None:
                super().__init__(*args)
                engines.append(self)  # noqa: B023

        run_workload(workload, Kept)
        stats = engines[0].stats()
        started = stats["lookups"]
        assert started <= len(workload.arrivals)
        if stats["preemptions"] and stats["resumed_tokens"]:
            return
    pytest.fail("no workload made a sequence give way")


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(api_keys=("one", "two"), admin_key="admin")) as found:
        yield found


def test_the_report_is_served_as_json_to_whoever_may_see_it(served) -> None:
    prompt = list(range(1, 200))
    for _ in range(3):
        served.ids(prompt)
    for key, status in (("one", 403), ("nonsense", 401), ("admin", 200)):
        response = served.client.get("/cache", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status, response.text
    report = response.json()
    assert report["cell_tokens"] == 64
    assert report["prefixes"][0]["tokens"] == 192
    assert report["prefixes"][0]["hits"] == 2
    kinds = report["memory"]["kinds"]
    assert set(kinds) == {"page", "state", "tail"}
    assert kinds["page"]["cached_bytes"] == kinds["page"]["cached"] * kinds["page"]["unit_bytes"] > 0
    assert json.dumps(report).count("secret") == 0


@pytest.mark.parametrize("limit", ["-1", "1001", "x", "1e3", "٣", "", "9" * 40])
def test_a_limit_that_makes_no_sense_gets_a_4xx_that_names_it(served, limit) -> None:
    response = served.client.get("/cache", params={"limit": limit}, headers={"authorization": "Bearer admin"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"


def test_a_limit_is_kept(served) -> None:
    for start in range(3):
        for _ in range(2):
            served.ids(list(range(start, 100 + start)))
    report = served.client.get("/cache", params={"limit": 2}, headers={"authorization": "Bearer admin"}).json()
    assert len(report["prefixes"]) == 2 <= report["shared_prefixes"]
