"""What one engine computed the other loads from a store that they share; whatever the store does, answers are right."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest

from tests.support.hashed.drops import drop
from tests.support.hashed.remote import FakeStore
from tests.support.models.engines import Ask, model_of, serve, spec_of, tokens
from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.tiers.disk_blocks import IDENTITY
from tests.support.tiers.remote_tier import PROMPT, finish, remote_engine, save_all
from tests.support.transfer.engine_pairs import engine_pair
from weft.base.config import EngineConfig
from weft.base.copies import UnitCopy, UnitLabel
from weft.base.errors import InvalidOption
from weft.base.options import Options, SizingFacts, resolve
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.engine.request import Request
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.misses import Reason
from weft.memory.tiers.disk.file import DamagedUnit
from weft.memory.tiers.remote.discovery import PathSearch
from weft.memory.tiers.remote.store import GuardedStore, ObjectMissing, StoreFailed
from weft.memory.tiers.remote.tier import decode_unit, encode_unit
from weft.runner.runner import Runner

ONE, TWO = b"1" * 32, b"2" * 32


@pytest.fixture(autouse=True)
def every_prompt_is_worth_asking_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.memory.tiers.tiers.LEAST_SECONDS_TO_ASK", 0.0)
    # No test waits for a clock.
    monkeypatch.setattr("weft.memory.tiers.remote.discovery.PATIENCE_SECONDS", 1e9)


def test_what_one_engine_computed_the_other_loads() -> None:
    store = FakeStore()
    one, other = remote_engine(store), remote_engine(store)
    assert finish(one, PROMPT).cached_tokens == 0
    save_all(one)
    report = finish(other, PROMPT)
    assert report.loaded_tokens == report.cached_tokens == 12
    assert other.ledger.tiers is not None
    assert other.ledger.tiers.links[0].stats()["loaded_tokens"] == 12
    # Under another salt, nothing is found.
    assert finish(other, PROMPT, TWO).cached_tokens == 0
    one.close()
    other.close()


def test_a_store_that_hangs_delays_no_step_and_its_prompt_starts_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    engine = remote_engine(store)
    store.open.clear()
    waits = engine.add(Request(np.array(PROMPT, np.int32), SamplingParams(max_tokens=3)))
    # Shorter than a cell: there is nothing to ask for.
    runs = engine.add(Request(np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=3)))
    seen: list[int] = []
    while len(seen) < 3:
        seen += [output.sequence for output in engine.step() if output.token is not None]
    assert seen == [runs] * 3, "the request asks the store, and the other one runs"
    monkeypatch.setattr("weft.memory.tiers.remote.discovery.PATIENCE_SECONDS", -1.0)
    while not any(output.finish for output in engine.step()):
        pass
    report = engine.report(waits)
    assert report.cached_tokens == 0
    assert report.miss is not None
    assert report.miss.reason is Reason.REMOTE_SILENT
    store.open.set()
    engine.close()


def test_a_store_that_fails_is_a_miss_with_a_reason_and_is_then_left_alone() -> None:
    store = FakeStore()
    store.fails = True
    engine = remote_engine(store)
    report = finish(engine, PROMPT)
    assert report.miss is not None
    assert report.miss.reason is Reason.REMOTE_SILENT
    for number in range(4):
        finish(engine, [number, *PROMPT])
    asked = store.calls.count("has")
    assert asked <= 3, "after three failures in a row the store is not asked"
    engine.close()


def test_a_store_is_tried_again_after_a_pause_that_doubles() -> None:
    store, now = FakeStore(), [0.0]
    guarded = GuardedStore(store, clock=lambda: now[0])
    store.fails = True

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(StoreFailed):
                guarded.has("x")

    fail(5)
    assert store.calls == ["has"] * 3
    now[0] = 5.5
    fail(5)
    assert store.calls == ["has"] * 6
    now[0] = 15.0
    assert guarded.away
    now[0] = 16.0
    store.fails = False
    assert guarded.has("x") is False
    with pytest.raises(ObjectMissing):
        guarded.get("x", 10)
    assert not guarded.away


@pytest.mark.parametrize("pointed", [True, False])
def test_a_search_finds_the_deepest_point_with_few_questions(pointed: bool) -> None:
    random = Random(3)
    for _ in range(400):
        cells = random.randint(1, 400)
        least, reach = random.randrange(cells), random.randint(0, cells)
        points = {depth for depth in range(1, reach + 1) if random.random() < 0.2}
        search, rounds, asked = PathSearch(cells, least, pointed), 0, 0
        while depths := search.next_round():
            assert all(least < depth <= cells for depth in depths)
            rounds, asked = rounds + 1, asked + len(depths)
            present = {d for d in depths if d in points} if search.of_points else {d for d in depths if d <= reach}
            search.answered(depths, present)
        best = max((depth for depth in points if depth > least), default=0) if pointed else reach
        assert search.result == (best if best > least else 0) or (pointed and rounds == 12)
        assert asked <= 200
        if reach <= least:
            assert asked == 1, "a new prompt costs one question"


def test_an_object_is_used_only_if_it_is_the_whole_unit_of_its_name() -> None:
    payload = memoryview(Random(1).randbytes(500))
    label = UnitLabel(b"k" * 32, None, 64, Origin.PROMPT_END.value, tenant_digest(ONE))
    data = encode_unit(UnitCopy("state", 3, 4), label, payload)
    assert decode_unit(data, Kind.STATE, label, 500) == payload
    wrong = [(data, Kind.PAGE, label), (data, Kind.STATE, label._replace(position=128))]
    wrong += [(data, Kind.STATE, label._replace(key=b"x" * 32)), (data + b"x", Kind.STATE, label)]
    wrong += [(data[:size], Kind.STATE, label) for size in (0, 10, 256, 755)]
    for each, kind, claimed in wrong:
        with pytest.raises(DamagedUnit):
            decode_unit(each, kind, claimed, 500)
    for place in range(len(data)):
        with pytest.raises(DamagedUnit):
            decode_unit(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], Kind.STATE, label, 500)


def test_dropping_a_tenant_drops_its_objects_also_those_of_other_engines() -> None:
    store = FakeStore()
    one, other = remote_engine(store), remote_engine(store)
    for salt in (ONE, TWO):
        finish(one, PROMPT, salt)
    save_all(one)
    mine, theirs = (tenant_digest(salt).hex() for salt in (ONE, TWO))
    assert {name.split("/")[1] for name in store.objects} == {mine, theirs}
    # The other engine has never seen any of it.
    assert drop(other, tenant=tenant_digest(ONE))["erased"] is True
    assert {name.split("/")[1] for name in store.objects} == {theirs}
    key = next(name for name in store.objects if "/page/" in name).rsplit("/", 1)[1]
    assert drop(one, prefix=bytes.fromhex(key))["erased"] is True
    assert not any(name.endswith(key) for name in store.objects)
    store.fails = True
    assert drop(one)["erased"] is False
    store.fails = False
    assert drop(one)["erased"] is True
    assert store.objects == {}
    one.close()
    other.close()


def test_an_engine_that_also_receives_prefixes_asks_the_store_and_drops_from_it() -> None:
    store = FakeStore()
    one, other = (remote_engine(store, arrivals_bytes=1 << 20) for _ in range(2))
    assert [link.name for link in one.ledger.tiers.links] == ["remote", "arrivals"]
    finish(one, PROMPT, ONE)
    save_all(one)
    assert finish(other, PROMPT, ONE).loaded_tokens == 12
    assert drop(other, tenant=tenant_digest(ONE))["erased"] is True
    assert store.objects == {}
    one.close()
    other.close()


def test_engines_with_roles_share_a_store_besides_what_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    store, spec = FakeStore(), spec_of("lfm2")
    monkeypatch.setattr("weft.memory.tiers.remote.store.S3Objects", lambda url: store)

    def make(config: EngineConfig) -> Runner:
        runner = Runner(model_of("lfm2"), spec, config.memory_bytes, config.max_sequences, threads=1)
        runner.tiers.add_remote("s3://bucket", IDENTITY)
        return runner

    sent, stored = tokens(200, 1), tokens(200, 2)
    with engine_pair(make, spec, remote=True) as pair:
        alone = [serve(pair.prefill, [Ask(prompt)])[0].tokens for prompt in (sent, stored)]
        pair.send(sent)
        answers = serve(pair.decode, [Ask(sent)])
        assert pair.arrived_tokens == 192
        save_all(pair.prefill)
        answers += serve(pair.decode, [Ask(stored)])
        assert [answer.tokens for answer in answers] == alone
        assert pair.decode.stats()["tiers"]["remote"]["loaded_tokens"] == 192
        assert drop(pair.decode)["erased"] is True
        assert store.objects == {}
        pair.prefill.close()
        pair.decode.close()


def test_dropping_a_prefix_drops_all_objects_below_it_also_those_that_this_engine_does_not_know() -> None:
    store = FakeStore()
    one = remote_engine(store)
    other_prompt = PROMPT[:4] + [each + 1 for each in PROMPT[4:]]
    finish(one, PROMPT, ONE)
    save_all(one)
    # The first two cells of the only path.
    root, branch = list(one.ledger.cache.trie.nodes)[:2]
    mine = {name for name in store.objects if not name.endswith(root.hex())}
    for prompt, salt in ((other_prompt, ONE), (PROMPT, TWO)):
        finish(one, prompt, salt)
        save_all(one)
    one.close()
    restarted = remote_engine(store)
    assert drop(restarted, prefix=branch[:8])["erased"] is True
    assert len(mine) >= 4
    assert not mine & store.objects.keys()
    assert finish(restarted, PROMPT, ONE).cached_tokens <= 4
    assert finish(restarted, other_prompt, ONE).cached_tokens == 12
    assert finish(restarted, PROMPT, TWO).cached_tokens == 12, "another tenant's objects stay"
    restarted.close()


def stored_path(store: FakeStore) -> list[str]:
    """Save a path, and return the keys of its cells."""
    engine = remote_engine(store)
    finish(engine, PROMPT, ONE)
    save_all(engine)
    engine.close()
    return [key.hex() for key in engine.ledger.cache.trie.nodes]


def test_dropping_a_prefix_drops_what_has_lost_the_cells_above_it() -> None:
    for lost in range(2):
        store = FakeStore()
        keys = stored_path(store)
        store.drop([name for name in store.objects if name.endswith(keys[lost])])
        engine = remote_engine(store)
        assert drop(engine, prefix=bytes.fromhex(keys[0]))["erased"] is True
        assert store.objects == {}
        engine.close()


def test_a_prefix_that_cannot_be_searched_for_is_not_reported_as_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    keys = stored_path(store)
    engine = remote_engine(store)
    with monkeypatch.context() as patch:
        patch.setattr("weft.memory.tiers.remote.stored_names.MOST_LISTED", 2)
        answer = drop(engine, prefix=bytes.fromhex(keys[0]))
    assert answer["erased"] is False
    assert "more than 2 objects; drop its tenant" in answer["reason"]
    assert store.objects
    engine.close()


class TenantsFailAndWait(FakeStore):
    """Fails to list the first tenant; lists others when `listed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = threading.Event()

    def names(self, prefix: str) -> Iterator[Sequence[str]]:
        if tenant_digest(ONE).hex() in prefix:
            raise StoreFailed("refused")
        assert self.listed.wait(SECONDS)
        return super().names(prefix)


def test_the_failure_of_a_drop_is_its_own_whatever_drops_follow() -> None:
    store = TenantsFailAndWait()
    engine = remote_engine(store)
    answers: dict[int, dict] = {}

    def answered(count: int) -> bool:
        engine.step()
        answers.update(engine.take_dropped())
        return len(answers) == count

    engine.begin_drop(1, tenant_digest(ONE))
    engine.begin_drop(2, tenant_digest(TWO))
    wait_until(lambda: answered(1))
    engine.begin_drop(3)
    store.listed.set()
    wait_until(lambda: answered(3))
    assert {number: answer["erased"] for number, answer in answers.items()} == {1: False, 2: True, 3: True}
    assert "refused" in answers[1]["reason"]
    engine.close()


def test_what_a_drop_removes_is_not_loaded_while_it_runs() -> None:
    store = TenantsFailAndWait()
    stored_path(store)
    engine = remote_engine(store)
    engine.begin_drop(1)
    asked = store.calls.count("has")
    assert finish(engine, PROMPT, ONE).cached_tokens == 0
    assert store.calls.count("has") == asked
    store.listed.set()
    while not engine.take_dropped():
        engine.step()
    finish(engine, PROMPT[::-1], ONE)
    assert store.calls.count("has") > asked, "requests ask again"
    engine.close()


def test_an_idle_engine_waits_for_a_drop_instead_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TenantsFailAndWait()
    engine = remote_engine(store)
    engine.begin_drop(1)
    while engine.ledger.hidden:
        engine.step()
    waited: list[int] = []
    monkeypatch.setattr(
        "weft.memory.tiers.remote.discovery.wait_for", lambda futures, seconds: waited.append(len(futures))
    )
    for _ in range(3):
        engine.step()
    assert waited == [1, 1, 1]
    store.listed.set()
    while not engine.take_dropped():
        engine.step()
    engine.close()


def test_the_end_of_a_path_is_put_after_everything_else() -> None:
    begun: list[str] = []
    pages_go_on = threading.Event()

    class HeldPages(FakeStore):
        def put(self, name: str, data: bytes) -> None:
            begun.append(name.split("/")[2])
            if begun[-1] == "page":
                assert pages_go_on.wait(SECONDS)
            super().put(name, data)

    engine = remote_engine(HeldPages())
    saves = engine.ledger.tiers.links[0].saves
    saves.chunk_bytes = saves.most_bytes = 1 << 20
    finish(engine, PROMPT)
    engine.write_behind()
    wait_until(lambda: len(begun) >= 3)
    assert set(begun) == {"page"}, "a state says that its pages are there"
    pages_go_on.set()
    save_all(engine)
    assert "state" in begun
    engine.close()


def test_a_remote_store_is_refused_where_it_cannot_work() -> None:
    facts = SizingFacts(1 << 30, None, lambda size: size, 1)
    assert resolve(Options(remote="s3://bucket/prefix"), facts)[0].remote is True
    with pytest.raises(InvalidOption, match="remote needs the cache"):
        resolve(Options(remote="s3://bucket", cache=False), facts)
    for wrong in ("bucket", "http://bucket", "s3://", "s3://bucket?x=1", "file:///etc"):
        with pytest.raises(InvalidOption, match="remote must be a URL"):
            Options(remote=wrong)
    with pytest.raises(InvalidOption, match="tensor_parallel must be 1 with remote"):
        Options(remote="s3://bucket", tensor_parallel=2)


def test_an_engine_with_nothing_else_to_do_waits_for_the_store_instead_of_spinning() -> None:
    store = FakeStore()
    engine = remote_engine(store)
    store.open.clear()
    engine.add(Request(np.array(PROMPT, np.int32), SamplingParams(max_tokens=1)))
    engine.step()
    wait_until(lambda: "has" in store.calls)
    waited: list[float] = []
    discovery = engine.ledger.tiers.links[0].discovery
    original = discovery.wait
    discovery.wait = lambda seconds: waited.append(seconds) or original(seconds)
    engine.step()
    assert waited
    store.open.set()
    while not engine.idle:
        engine.step()
    engine.close()
