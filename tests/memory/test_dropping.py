"""A tenant, a prefix or everything can be dropped from all tiers, by the operator only, and leaves no byte on disk."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.hashed.chained import run_chained
from tests.support.hashed.drops import DroppingEngine, drop
from tests.support.models.engines import Ask, greedy, make_engine, serve, tokens
from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.http_server import serving
from tests.support.tiers.chain import chained_engine, save_all
from tests.support.tiers.demotion import ask as ask_for
from tests.support.tiers.demotion import engine_with
from weft.base.copies import Direction
from weft.base.grid import CELL
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.drafting.policy.choosing import Drafting
from weft.engine.events import Report
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory import dropping
from weft.memory.keys import PrefixIdentity
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.disk.file import DiskFile, open_existing
from weft.memory.tiers.disk.tier import DiskCopies
from weft.memory.trie import Node
from weft.server.settings import ServerSettings

ONE, TWO = b"1" * 32, b"2" * 32


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_text_that_a_request_leaves_for_drafts_during_a_drop_does_not_outlive_it(monkeypatch) -> None:
    monkeypatch.setattr(dropping, "LOOKS_PER_STEP", 1)
    engine = make_engine("lfm2", drafting=Drafting(4))
    serve(engine, [Ask(tokens(300, number), greedy(1), salt=ONE) for number in range(8)])
    texts = engine.planner.drafting.shared
    assert texts.tokens
    engine.begin_drop(0, tenant_digest(ONE))
    assert not texts.tokens
    engine.add(Request(np.array(tokens(40, 9), np.int32), greedy(1), salt=ONE))
    left = 0
    while not engine.take_dropped():
        engine.step()
        left = max(left, texts.tokens)
    assert left, "the drop ended before the request, so this test shows nothing"
    assert not texts.tokens


def test_dropping_a_tenant_removes_it_from_all_tiers_and_overwrites_it(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    engine = chained_engine("falcon_h1", path)
    mine, theirs = Ask(tokens(300, 1), salt=ONE + b"and more"), Ask(tokens(300, 2), salt=TWO)
    for ask in (mine, theirs):
        serve(engine, [ask])
    save_all(engine)
    file = engine.copier._copies.disk
    stored = {each.hex() for each in engine.ledger.tenancy.tokens([engine.ledger.caches[2].trie], 64)}
    assert stored == {tenant_digest(ONE).hex(), tenant_digest(TWO).hex()}
    places = []
    disk = engine.ledger.caches[2]
    for node in disk.trie.nodes.values():
        if engine.ledger.tenancy.of(node) == tenant_digest(ONE):
            places.append((file.layout.offset_of("page", node.page), file.layout.padded["page"]))
    raw = path.read_bytes()
    assert places
    assert all(any(raw[first : first + size]) for first, size in places)
    found = drop(engine, tenant=tenant_digest(ONE))
    assert found["left_tokens"] == 0
    assert set(found["dropped_tokens"]) == {"device", "host", "disk"}
    assert found["dropped_tokens"]["disk"] >= 192
    raw = path.read_bytes()
    assert not any(any(raw[first : first + size]) for first, size in places), "bytes of the tenant are left"
    assert serve(engine, [mine])[0].report.cached_tokens == 0
    assert serve(engine, [theirs])[0].report.cached_tokens >= 192
    engine.close()
    # Neither does it come back with the next process; what was computed since is another matter.
    engine = chained_engine("falcon_h1", path)
    assert serve(engine, [theirs])[0].report.cached_tokens >= 192
    engine.close()


def test_dropping_a_prefix_keeps_others_of_the_same_tenant(tmp_path: Path) -> None:
    engine = chained_engine("llama", tmp_path / "tier")
    first, second = Ask(tokens(300, 1)), Ask(tokens(300, 2))
    for ask in (first, second):
        serve(engine, [ask])
    save_all(engine)
    disk = engine.ledger.caches[2]
    key = next(iter(disk.trie.nodes))
    assert drop(engine, prefix=key[:8])["dropped_tokens"]["disk"] >= 256
    counts = sorted(serve(engine, [ask])[0].report.cached_tokens for ask in (first, second))
    assert counts == [0, 256]
    assert drop(engine)["left_tokens"] == 0
    assert not any(len(cache.trie) for cache in engine.ledger.caches)
    engine.close()


def test_what_a_running_sequence_uses_is_counted_as_left(tmp_path: Path) -> None:
    engine = chained_engine("llama", tmp_path / "tier")
    serve(engine, [Ask(tokens(300, 1))])
    engine.add(Request(np.array(tokens(300, 1), np.int32), SamplingParams(max_tokens=40)))
    engine.step()
    assert drop(engine)["left_tokens"] == 256
    while not engine.idle:
        engine.step()
    assert drop(engine)["left_tokens"] == 0
    engine.close()


def test_answers_to_prompts_shorter_than_a_cell_belong_to_their_tenant_too(tmp_path: Path) -> None:
    engine = chained_engine("llama", tmp_path / "tier")
    first = serve(engine, [Ask(tokens(40, 1), greedy(200), salt=ONE)])[0]
    again = Ask(tokens(40, 1) + first.tokens, salt=ONE)
    save_all(engine)
    assert drop(engine, tenant=tenant_digest(ONE))["dropped_tokens"]["disk"] >= 192
    assert serve(engine, [again])[0].report.cached_tokens == 0
    engine.close()


def test_bytes_that_could_not_be_overwritten_are_reported_and_overwritten_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = chained_engine("llama", tmp_path / "tier")
    serve(engine, [Ask(tokens(300, 1), salt=ONE)])
    save_all(engine)
    blocks = type(engine.copier._copies.disk._blocks)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "write", failing)
        assert drop(engine, tenant=tenant_digest(ONE))["erased"] is False
    assert drop(engine, tenant=tenant_digest(ONE))["erased"] is True
    engine.close()
    engine = chained_engine("llama", tmp_path / "tier")
    assert serve(engine, [Ask(tokens(300, 1), salt=ONE)])[0].report.cached_tokens == 0
    engine.close()


def test_what_a_file_evicts_during_a_drop_is_overwritten_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tier"
    engine = chained_engine("llama", path)
    serve(engine, [Ask(tokens(300, 1), salt=ONE)])
    save_all(engine)
    writes, stage = threading.Event(), DiskCopies._stage
    monkeypatch.setattr(DiskCopies, "_stage", lambda self, plan: stage(self, plan) if writes.wait(SECONDS) else None)
    engine.begin_drop(0, tenant_digest(ONE))
    while engine.dropping._waiting[0].tier < 2:
        engine.step()
    # The drop comes to the file after a plan that forgets these cells, and finds none of them.
    engine.flush()
    engine.copier.launch()
    for _ in range(20):
        engine.step()
        assert not engine.take_dropped(), "the file still has the headers"
    writes.set()
    while not (found := engine.take_dropped()):
        engine.step()
    assert found[0]["erased"] is True
    assert not any(path.read_bytes()[engine.copier._copies.disk.layout.payload_offset :])
    assert not any(link.saves.erasing.dropping for link in engine.ledger.tiers.links)
    engine.close()


def test_a_drop_whose_marks_could_not_be_written_is_completed_when_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ask = tmp_path / "tier", Ask(tokens(300, 1), salt=ONE)
    engine = chained_engine("llama", path)
    serve(engine, [ask])
    save_all(engine)
    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "doom", failing)
        answer = drop(engine, tenant=tenant_digest(ONE))
    assert answer["erased"] is False
    assert "writing to the file failed" in answer["reason"]
    engine.close()
    assert not any(path.read_bytes()[engine.copier._copies.disk.layout.payload_offset :])
    engine = chained_engine("llama", path)
    assert serve(engine, [ask])[0].report.cached_tokens == 0
    engine.close()


@pytest.mark.parametrize("saved", [False, True])
def test_a_server_that_stops_during_a_drop_completes_it_before_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    monkeypatch.setattr(dropping, "LOOKS_PER_STEP", 1)
    path, ask = tmp_path / "tier", Ask(tokens(300, 1), salt=ONE)
    engine = chained_engine("llama", path)
    serve(engine, [ask])
    if saved:
        save_all(engine)
    engine.begin_drop(1, tenant=tenant_digest(ONE))
    engine.step()
    assert engine.ledger.hidden
    engine.close()
    engine = chained_engine("llama", path)
    assert serve(engine, [ask])[0].report.cached_tokens == 0
    engine.close()


def test_a_file_that_fails_to_the_end_does_not_keep_the_server_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tier"
    engine = chained_engine("llama", path)
    serve(engine, [Ask(tokens(300, 1), salt=ONE)])
    save_all(engine)
    dooms: list[object] = []
    monkeypatch.setattr(DiskFile, "doom", lambda self, units: dooms.append(units) or (units and failing()))
    assert drop(engine, tenant=tenant_digest(ONE))["erased"] is False
    tried = len(dooms)
    engine.close()
    assert len(dooms) == tried + 1, "tried once more, not without end"


def test_steps_go_on_while_a_large_drop_is_overwritten_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = chained_engine("llama", tmp_path / "tier", max_length=420)
    asks = [Ask(tokens(300, seed), salt=ONE) for seed in range(6)]
    for ask in asks:
        serve(engine, [ask])
    save_all(engine)
    assert engine.ledger.tiers is not None
    saves, file = engine.ledger.tiers.links[1].saves, engine.copier._copies.disk
    saves.chunk_bytes = 2 * file.layout.padded["page"]
    doom, erase = DiskFile.doom, DiskFile.erase
    held, calls = threading.Event(), list[tuple[str, int]]()

    def counted_doom(self: DiskFile, units: list) -> None:
        calls.extend([("doom", len(units))] if units else [])
        doom(self, units)

    def held_erase(self: DiskFile, units: Iterable, *together: object) -> None:
        chosen = list(units)
        calls.extend([("erase", len(chosen))] if chosen else [])
        if chosen:
            assert held.wait(SECONDS)
        erase(self, chosen)

    monkeypatch.setattr(DiskFile, "doom", counted_doom)
    monkeypatch.setattr(DiskFile, "erase", held_erase)
    cells = len(engine.ledger.caches[2].trie)
    engine.begin_drop(7, tenant_digest(ONE))
    assert all(len(cache.trie) for cache in engine.ledger.caches), "cells are dropped between steps"
    # Not one byte is overwritten while these are served, and none of them waits for it.
    answers = [serve_beside(engine, ask) for ask in (asks[0], Ask(tokens(300, 9)))]
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert engine.take_dropped() == {}
    held.set()
    while not (found := engine.take_dropped()):
        engine.step()
    assert found[7]["erased"] is True
    assert found[7]["dropped_tokens"]["disk"] == 64 * cells
    assert calls[0] == ("doom", cells), "all units are marked before the first is overwritten"
    assert all(name == "erase" and count <= 2 for name, count in calls[1:])
    assert sum(count for _, count in calls[1:]) == cells
    engine.close()


def keys_of(ask: Ask) -> list[bytes]:
    return PrefixIdentity(CELL, ask.salt).keys(np.array(ask.prompt, np.int32))


def serve_beside(engine: Engine, ask: Ask) -> Report:
    """Serve a request without waiting until the engine is idle."""
    number = engine.add(Request(np.array(ask.prompt, np.int32), SamplingParams(max_tokens=3), salt=ask.salt))
    while not any(output.finish for output in engine.step() if output.sequence == number):
        pass
    return engine.report(number)


def test_an_interrupted_drop_is_not_found_by_the_next_process_which_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ask = tmp_path / "tier", Ask(tokens(300, 1), salt=ONE)
    engine = chained_engine("falcon_h1", path)
    serve(engine, [ask])
    save_all(engine)
    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "erase", failing)
        assert drop(engine, tenant=tenant_digest(ONE))["erased"] is False
        engine.close()
    layout = engine.copier._copies.disk.layout
    assert any(path.read_bytes()[layout.payload_offset :])
    engine = chained_engine("falcon_h1", path)
    assert len(engine.copier._copies.disk.doomed) >= 4
    assert not engine.idle, "the bytes are still to be overwritten"
    assert serve(engine, [ask])[0].report.cached_tokens == 0
    while engine.ledger.tiers.erasing:
        engine.step()
    drop(engine, tenant=tenant_digest(ONE))
    engine.close()
    assert not any(path.read_bytes()[layout.payload_offset :])


def test_dropping_a_tenant_right_after_a_start_reads_no_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tier"
    mine, theirs = Ask(tokens(300, 1), salt=ONE), Ask(tokens(300, 2), salt=TWO)
    engine = chained_engine("falcon_h1", path)
    for ask in (mine, theirs):
        serve(engine, [ask])
    engine.close()
    engine = chained_engine("falcon_h1", path)
    decoded: list[int] = []
    original = DiskFile.header
    monkeypatch.setattr(DiskFile, "header", lambda self, row: decoded.append(row) or original(self, row))
    engine.begin_drop(0, tenant_digest(ONE))
    assert decoded == []
    while not (found := engine.take_dropped()):
        engine.step()
    assert found[0]["dropped_tokens"]["disk"] == 256
    assert serve(engine, [mine])[0].report.cached_tokens == 0
    assert serve(engine, [theirs])[0].report.cached_tokens >= 192
    engine.close()


@pytest.mark.parametrize("named", ["tenant", "prefix"])
def test_a_large_drop_takes_a_bounded_part_of_each_step_and_hides_all_of_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    engine = chained_engine("llama", tmp_path / "tier", max_length=420)
    mine, theirs = [[Ask(tokens(300, seed), salt=salt) for seed in range(3)] for salt in (ONE, TWO)]
    for ask in (*mine, *theirs):
        serve(engine, [ask])
    save_all(engine)
    monkeypatch.setattr(dropping, "LOOKS_PER_STEP", 1)
    first = keys_of(mine[2])[0]
    choice = {"tenant": tenant_digest(ONE)} if named == "tenant" else {"prefix": first}
    chosen, caches = engine.ledger.tenancy.chooser(choice.get("tenant"), choice.get("prefix")), engine.ledger.caches

    def held() -> list[int]:
        return [sum(map(chosen, cache.trie.nodes.values())) for cache in caches]

    before = now = held()
    assert sum(before) >= 6
    engine.begin_drop(3, **choice)
    while sum(now):
        assert serve_beside(engine, mine[2]).cached_tokens == 0, "it was accepted, so nothing of it may be hit"
        now = held()
        engine.step()
        assert sum(held()) >= sum(now) - 1
    while not (found := engine.take_dropped()):
        engine.step()
    assert found[3]["dropped_tokens"] == {n: 64 * c for n, c in zip(engine.ledger.tier_names, before, strict=True)}
    assert found[3]["left_tokens"] == 0
    # What is computed from here on is cached again, and other tenants have lost nothing.
    assert [serve_beside(engine, mine[2]).cached_tokens for _ in range(2)][1] == 256
    assert serve_beside(engine, theirs[2]).cached_tokens == 256
    engine.close()


def test_every_answer_is_the_oracles_while_prefixes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0
    for seed in range(10):
        monkeypatch.setattr(dropping, "LOOKS_PER_STEP", (1, 20, 2048)[seed % 3])
        engines = run_chained(seed, DroppingEngine)
        for engine in engines:
            begun += engine.begun
            assert len(engine.answers) == engine.begun, "a drop was not answered"
    assert begun > 30


def test_a_drop_over_http_is_answered_when_the_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    options = {"max_length": 600, "max_sequences": 4, "memory": "16MiB", "disk": str(path), "disk_size": "8MiB"}
    with serving(ServerSettings(model_name="tiny"), **options) as server:
        server.post("/v1/completions", {"prompt": tokens(200, 1), "max_tokens": 1})

        def saved() -> float:
            return server.client.get("/cache").json()["tiers"]["disk"]["saved_bytes"]

        wait_until(lambda: saved() > 0)
        answer = server.client.delete("/cache?all=true")
        assert answer.status_code == 200
        assert answer.json()["erased"] is True
        with open_copy(path) as file:
            assert not file.found
            assert not any(path.read_bytes()[file.layout.payload_offset :])


@contextmanager
def open_copy(path: Path) -> Iterator[DiskFile]:
    """A file that another process has locked, as it is now."""
    copy = path.with_name("copy")
    copy.touch(0o600)
    copy.write_bytes(path.read_bytes())
    file = open_existing(copy)
    yield file
    file.close()


def failing(*_: object) -> None:
    raise OSError(errno.EIO, "no such luck")


def test_a_copy_that_was_under_way_does_not_bring_back_what_is_dropped() -> None:
    engine, device = engine_with(memory_bytes=6 << 10)
    for number in range(6):
        ask_for(engine, number)
    device.patience = 0.0
    assert engine.ledger.tiers is not None
    link = engine.ledger.tiers.links[0]
    link.demotion.least_bytes = 1 << 20
    link.saves.chunk_bytes = 1
    engine.copier.launch()
    assert engine.ledger.tiers.in_flight > 1
    engine.begin_drop(0)
    before = len(link.lower.trie)
    # One of them lands before the others.
    first = engine.copier._flights[0, Direction.SAVE][0][1]
    device.copied = lambda ticket, wait: 1e-6 if ticket is first else None
    engine.copier.land()
    assert len(link.lower.trie) == before, "a copy that was given up is entered"
    assert engine.take_dropped() == {}
    del device.copied
    while not engine.take_dropped():
        engine.step()
    while not engine.idle:
        engine.step()
    assert not any(len(cache.trie) for cache in engine.ledger.caches)


def test_everything_can_be_dropped_over_http() -> None:
    with serving(ServerSettings(model_name="tiny"), max_length=600) as server:
        server.post("/v1/completions", {"prompt": tokens(200, 1), "max_tokens": 1})
        answer = server.client.delete("/cache?all=true")
        assert answer.status_code == 200
        assert answer.json() == {"dropped_tokens": {"device": 192}, "left_tokens": 0}


def test_only_the_admin_drops_and_only_what_the_query_names() -> None:
    settings = ServerSettings(api_keys=("first-key", "second-key"), admin_key="admin-key")
    with serving(settings, max_length=600) as server:
        body = {"prompt": tokens(200, 1), "max_tokens": 1}
        for key in ("first-key", "second-key"):
            server.post("/v1/completions", body, headers=bearer(key))

        def cached(key: str) -> int:
            usage = server.post("/v1/completions", body, headers=bearer(key))["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        def dropped(query: str, key: str = "admin-key") -> tuple[int, str]:
            answer = server.client.delete(f"/cache{query}", headers=bearer(key))
            return answer.status_code, answer.text

        assert dropped("?tenant=key-1", "first-key")[0] == 403
        for wrong in ("", "?tenant=unknown", "?prefix=zz", "?digest=00", "?all=yes", "?all=true&tenant=key-1", "?x=1"):
            assert dropped(wrong)[0] == 400, wrong
        tenants = server.client.get("/cache", headers=bearer("admin-key")).json()["tenants"]
        assert {each["name"] for each in tenants} == {"key-1", "key-2"}
        assert dropped("?tenant=key-1")[0] == 200
        assert (cached("first-key"), cached("second-key")) == (0, 192)
        (digest,) = (each["digest"] for each in tenants if each["name"] == "key-2")
        assert dropped(f"?digest={digest}")[0] == 200
        assert (cached("first-key"), cached("second-key")) == (192, 0)


def test_the_tenants_of_cells_that_are_cached_nowhere_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.memory.tenancy.LEAST_NOTED", 4)
    tenancy = Tenancy(list)
    for number in range(100):
        tenancy.note(bytes([number]), lambda: b"t")
    assert sum(tenancy.of(Node(bytes([number]), None, None, 0)) == b"t" for number in range(100)) <= 4
