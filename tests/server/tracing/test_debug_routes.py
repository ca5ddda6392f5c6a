"""`/debug/events` and `/debug/requests/ID` over HTTP: what they say, how much of it, and to whom."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.http_server import Served, serving
from tests.support.servers.watching import Watcher, watching
from weft.base.tenants import tenant_digest
from weft.engine.events import Output
from weft.engine.loop import Engine
from weft.engine.tracing import tracer
from weft.server.access.auth import Keys
from weft.server.settings import ServerSettings
from weft.server.tracing import hub, records

KEYS = ServerSettings(api_keys=("first-key", "second-key"), admin_key="admin-key")
EVENT_FIELDS = {
    "waits": {"for", "prompt"},
    "starts": {"prompt", "cached", "loaded", "miss", "again"},
    "computes": {"from", "to", "of"},
    "decodes": {"ms", "tokens", "drafts", "accepted"},
    "ends": {"reason", "tokens"},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ServerSettings(trusted_hosts=())) as found:
        yield found


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with serving(KEYS) as found:
        yield found


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def digest_of(key: str) -> str:
    found = Keys(KEYS).tenant([(b"authorization", f"Bearer {key}".encode())])
    assert found is not None
    return tenant_digest(found.salt).hex()


# what they say --------------------------------------------------------------------------------------------------------


def test_a_request_is_told_from_its_wait_to_its_end(served: Served) -> None:
    prompt = "word " * 60
    served.complete(prompt)
    with watching(served.url) as watcher:
        name = served.complete(prompt, max_tokens=40, ignore_eos=True)["id"]
        assert watcher.ended(name)["tokens"] == 40
        for kind, fields in EVENT_FIELDS.items():
            found = watcher.of(name, kind)
            assert all(set(each) == fields | {"event", "id", "tenant", "at"} for each in found)
            assert found
        [start] = watcher.of(name, "starts")
        assert start["cached"] >= 192
        assert start["miss"]["at"] == start["cached"]
        chunks = watcher.of(name, "computes")
        assert [chunks[0]["from"], chunks[-1]["to"]] == [start["cached"], start["prompt"]]
        assert sum(each["tokens"] for each in watcher.of(name, "decodes")) == 40
        steps = [step for batch in watcher.batches for step in batch["steps"]]
        assert sum(each["prompt_tokens"] for each in steps) == start["prompt"] - start["cached"]
    record = served.client.get(f"/debug/requests/{name}").json()
    [answer] = record["answers"]
    assert (record["id"], record["state"], answer["id"]) == (name, "ended", name)
    assert (answer["prompt"], answer["cached"], answer["miss"]) == (start["prompt"], start["cached"], start["miss"])
    assert answer["computed"] + answer["cached"] == answer["prompt"]
    assert (answer["tokens"], answer["finish"]) == (40, "length")
    assert 0 <= answer["queued_ms"] <= answer["first_token_ms"] <= answer["total_ms"]


def test_each_of_several_answers_has_its_own_lane(served: Served) -> None:
    with watching(served.url) as watcher:
        name = served.complete("Once", n=3, max_tokens=5, ignore_eos=True)["id"]
        assert [watcher.ended(f"{name}#{place}")["tokens"] for place in range(3)] == [5, 5, 5]
    record = served.client.get(f"/debug/requests/{name}").json()
    assert [answer["id"] for answer in record["answers"]] == [f"{name}#{place}" for place in range(3)]


def test_a_request_is_found_by_the_id_of_its_answer_or_of_its_log_line(served: Served) -> None:
    served.client.post("/generate", json={"text": "a", "rid": "mine/1"}, headers={"x-request-id": "line-1"})
    found = [served.client.get(f"/debug/requests/{name}").json() for name in ("mine%2F1", "line-1")]
    assert found[0] == found[1]
    assert (found[0]["id"], found[0]["request"]) == ("mine/1", "line-1")


def test_a_client_that_comes_late_learns_what_runs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = pause_after(monkeypatch, 6)
    asking = threading.Thread(target=served.generate, kwargs={"rid": "late", "sampling": {"max_new_tokens": 9}})
    asking.start()
    assert reached.wait(SECONDS)
    with watching(served.url) as watcher:
        record = served.client.get("/debug/requests/late").json()
        go.set()
        assert watcher.ended("late")["tokens"] == 9
        [runs] = watcher.of("late", "runs")
        decoded = sum(each["tokens"] for each in watcher.of("late", "decodes"))
        assert (runs["state"], runs["for"], runs["tokens"] + decoded) == ("decodes", None, 9)
    asking.join()
    [answer] = record["answers"]
    assert (record["state"], answer["finish"], answer["total_ms"]) == ("running", None, None)
    for name in ("prompt", "cached", "loaded", "miss", "computed", "tokens", "drafts", "accepted", "preemptions"):
        assert answer[name] == runs[name]


def pause_after(patch: pytest.MonkeyPatch, count: int) -> tuple[threading.Event, threading.Event]:
    """Let engines do nothing after some steps but take commands. Return events: it has come to that; it goes on."""
    reached, go, taken, step = threading.Event(), threading.Event(), [0], Engine.step

    def paused(engine: Engine) -> list[Output]:
        if taken[0] >= count and not go.is_set():
            reached.set()
            return []
        taken[0] += not engine.idle
        return step(engine)

    patch.setattr(Engine, "step", paused)
    return reached, go


# bounds ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_built_unless_a_client_watches(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    for name in ("Waits", "Starts", "Computes", "Decoded", "Ends", "Runs", "StepFacts", "Lane", "TraceBatch"):
        kind = getattr(tracer, name)

        def build(*given: object, kind: Callable[..., object] = kind, **named: object) -> object:
            built.append(kind.__name__)
            return kind(*given, **named)

        monkeypatch.setattr(tracer, name, build)
    alone(served)
    served.complete()
    assert built == []
    with watching(served.url) as watcher:
        watcher.ended(served.complete()["id"])
        assert {"Lane", "Waits", "Starts", "Computes", "Decoded", "Ends", "StepFacts", "TraceBatch"} <= set(built)
    alone(served)
    built.clear()
    served.complete()
    assert built == []


def hub_of(served: Served) -> Any:
    return front_of(served).traces


def alone(served: Served) -> None:
    """Wait until nobody listens, and the engine knows."""
    wait_until(lambda: not hub_of(served).listeners)
    served.on_loop(served.backend.stats)


def front_of(served: Served) -> Any:
    """Return the front, which the application's routes are bound to."""
    app = served.app
    route = next(each for each in app._app._app.routes if each.path == "/debug/events")
    return route.endpoint.args[0]


def test_a_further_client_is_refused_until_one_leaves(keyed: Served) -> None:
    alone(keyed)
    open_watchers = [Watcher(keyed.url, "first-key") for _ in range(hub.MOST_OF_TENANT)]
    for each in open_watchers:
        each.start()
    refused = Watcher(keyed.url, "first-key")
    refused.start()
    assert refused.status == 429
    # It keeps no other tenant out.
    with watching(keyed.url, "second-key"):
        pass
    open_watchers.pop().close()
    wait_until(lambda: sum(each.digest == digest_of("first-key") for each in hub_of(keyed).listeners) == 3)
    with watching(keyed.url, "first-key"):
        pass
    for each in open_watchers:
        each.close()


def test_only_the_last_requests_are_kept(served: Served) -> None:
    found = front_of(served).requests
    first = served.complete()["id"]
    assert served.client.get(f"/debug/requests/{first}").status_code == 200
    kept = len(found._ended)
    for _ in range(records.MOST_REQUESTS):
        found._ended.append(((), found._ended[0][1].__class__("x", None, "", "ended", 0.0, [])))
    assert kept < len(found._ended) == records.MOST_REQUESTS
    assert served.client.get(f"/debug/requests/{first}").status_code == 404


def test_the_stream_ends_with_the_server() -> None:
    with serving(ServerSettings()) as found:
        watcher = Watcher(found.url)
        watcher.start()
        found.on_loop(lambda: found.backend.stop(0))
        watcher.wait_for(lambda each: each.done)
        watcher.close()


# tenants --------------------------------------------------------------------------------------------------------------

NAMES = ("first-key", "second-key", "admin-key")


def check_tenants(served: Served, seed: int) -> None:
    """Random requests of all keys: each key is told everything of its own, and nothing that others have."""
    random = Random(seed)
    asked: dict[str, list[str]] = {key: [] for key in NAMES}
    with ExitStack() as opened:
        watchers = {key: opened.enter_context(watching(served.url, key)) for key in NAMES}
        ask_and_judge(served, seed, random, watchers, asked)


def ask_and_judge(
    served: Served, seed: int, random: Random, watchers: dict[str, Watcher], asked: dict[str, list[str]]
) -> None:
    for number in range(9):
        key = random.choice(NAMES)
        # The same texts and the same ids, so that a mistake would show.
        rid = random.choice(["same", f"own {seed} {number}"])
        body = {"text": random.choice(["secret " * 40, "Once"]), "rid": rid}
        body["sampling_params"] = {"max_new_tokens": random.randint(1, 9), "ignore_eos": True}
        assert served.client.post("/generate", json=body, headers=as_key(key)).status_code == 200
        asked[key].append(rid)
    for key in NAMES[:2]:
        judge_tenant(served, key, watchers[key], asked)
    for name in set().union(*map(set, asked.values())):
        watchers["admin-key"].ended(name)


def judge_tenant(served: Served, key: str, watcher: Watcher, asked: dict[str, list[str]]) -> None:
    own = asked[key]
    wait_until(lambda: sum(each["event"] == "ends" for each in watcher.events) >= len(own))
    assert {each["tenant"] for each in watcher.events} <= {digest_of(key)}
    assert [each["id"] for each in watcher.events if each["event"] == "ends"] == own
    for batch in watcher.batches:
        assert set(batch) <= {"at", "events", "lost", "opening"}
        assert batch["events"] or "opening" in batch
        assert batch["lost"] == 0
    # One opening is its own; those of others are not its business.
    assert watcher.opening == 1
    others = set().union(*(set(names) for other, names in asked.items() if other != key)) - set(own)
    unknown = served.client.get("/debug/requests/never", headers=as_key(key))
    for name in others:
        refused = served.client.get(f"/debug/requests/{name}", headers=as_key(key))
        assert (refused.status_code, refused.content) == (404, unknown.content)
    for name in own:
        record = served.client.get(f"/debug/requests/{name}", headers=as_key(key)).json()
        assert record["tenant"] == digest_of(key)


@pytest.mark.parametrize("seed", range(4))
def test_a_tenant_sees_its_own_requests_only(keyed: Served, seed: int) -> None:
    alone(keyed)
    check_tenants(keyed, seed)


def shows_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub, "visible", lambda batch, digest: batch)


def counts_all(patch: pytest.MonkeyPatch) -> None:
    """Messages come as often as those of everyone, and count them."""
    visible = hub.visible
    patch.setattr(hub, "visible", lambda batch, digest: replace(visible(batch, digest), lost=len(batch.events)))


def shows_steps(patch: pytest.MonkeyPatch) -> None:
    as_json = hub.as_json
    patch.setattr(hub, "as_json", lambda batch, admin, lost: as_json(batch, True, lost))


def opens_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub.TraceListener, "_follows", lambda self, batch: True)


def finds_all(patch: pytest.MonkeyPatch) -> None:
    find = records.RequestRecords.find

    async def anyone(self: Any, name: str, tenant: Any) -> Any:
        return await find(self, name, records.Tenant(tenant.salt, admin=True))

    patch.setattr(records.RequestRecords, "find", anyone)


@pytest.mark.parametrize("sow", [shows_all, counts_all, shows_steps, opens_for_all, finds_all])
def test_a_leak_between_tenants_is_caught(
    keyed: Served, monkeypatch: pytest.MonkeyPatch, sow: Callable[[pytest.MonkeyPatch], None]
) -> None:
    alone(keyed)
    sow(monkeypatch)
    with pytest.raises(AssertionError):
        [check_tenants(keyed, seed) for seed in range(4)]


def test_events_are_json_that_a_browser_reads(served: Served) -> None:
    """Numbers are numbers, and nothing is without end."""
    with watching(served.url) as watcher:
        watcher.ended(served.complete()["id"])
        for text in list(watcher.texts):
            json.loads(text, parse_constant=lambda name: pytest.fail(name))
