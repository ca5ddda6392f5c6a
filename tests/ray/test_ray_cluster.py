"""A fleet on a local Ray cluster: streams, loses a replica and no other request, and scales with its queue."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fences import ROOT
from tests.support.models import tiny_model
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.ray import build

# Far more than anything takes on a busy machine.
WAIT = 300
ENDLESS = 60_000
SEATS = 2
Replicas = dict[str, dict[str, Any]]
Deploy = Callable[[dict[str, Any]], str]
SETTINGS = {
    "options": {
        **tiny_model.OPTIONS,
        "served_model_name": "tiny",
        "memory": "256MiB",
        "max_length": 65536,
        "max_sequences": SEATS,
        "threads": 1,
        "drain_seconds": 60,
        "log_level": "warning",
    },
    "autoscaling": {
        "min": 2,
        "max": 3,
        "target_open": 3,
        "window_seconds": 11,
        "upscale_seconds": 0,
        "downscale_seconds": 1,
    },
    "cpus": 0.25,
    "ingress": {"cpus": 0.25},
}


@pytest.fixture
def deploy(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, Any]], str]]:
    """Deploy a fleet on a cluster of this process, and end every process of it afterwards."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'weft-serve[ray]'")
    # Ray writes a token into the home folder, which is read once by this process and by each that Ray starts: one
    # folder for all tests. Compiled kernels stay where they are.
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts its workers with a niceness of 15, so that they hardly run beside other programs.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    # On a busy machine Serve's proxy needs longer than the five seconds after which Serve replaces it.
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(WAIT))
    monkeypatch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", str(WAIT))
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)

    def make(settings: dict[str, Any]) -> str:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(settings), name="weft")
        return f"http://127.0.0.1:{port}"

    try:
        yield make
    finally:
        serve.shutdown()
        ray.shutdown()


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.1)


async def announced() -> Replicas:
    from ray import serve

    found = await serve.get_deployment_handle("members", "weft").members.remote()
    return {each["name"]: each for each in found if not each["leaving"]}


async def open_requests(replica: dict[str, Any]) -> int:
    """Ask an engine itself, as another router does."""
    backend = RemoteBackend(ReplicaAddress(replica["host"], replica["port"]), replica["secret"].encode())
    await backend.start()
    try:
        return int((await backend.stats())["open"])
    finally:
        await backend.stop(0)


class Reader:
    """Reads an answer until it ends or `stop` is called: `end` is "done", "error", or None.

    `chunks` counts what has arrived; `tokens` is the length of the answer, which arrives last.
    """

    def __init__(self, client: httpx.AsyncClient, prompt: str, tokens: int = ENDLESS) -> None:
        self.chunks = self.tokens = 0
        self.end: str | None = None
        self.reading = asyncio.ensure_future(self._read(client, prompt, tokens))

    async def _read(self, client: httpx.AsyncClient, prompt: str, tokens: int) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                text = line.removeprefix("data: ")
                if text == "[DONE]":
                    self.end = self.end or "done"
                    break
                event = json.loads(text)
                if "error" in event:
                    self.end = "error"
                elif event.get("usage"):
                    self.tokens = event["usage"]["completion_tokens"]
                else:
                    self.chunks += 1

    async def stop(self) -> None:
        """Disconnect, as a client does that has gone."""
        self.reading.cancel()
        await asyncio.wait([self.reading])

    async def whole(self) -> tuple[int, str | None]:
        async with asyncio.timeout(WAIT):
            await self.reading
        return self.tokens, self.end


def kill(replica: str) -> None:
    kill_one(replica.rpartition("#")[2])


def kill_one(part: str, restart: bool = False) -> None:
    """Kill the actor with this in its name."""
    import ray

    [name] = [each for each in ray.util.list_named_actors(all_namespaces=True) if part in each["name"]]
    ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]), no_restart=not restart)


@pytest.mark.slow
# Ray's own, of libraries that it uses.
@pytest.mark.filterwarnings("ignore")
def test_a_fleet_on_ray_streams_survives_a_death_and_scales_with_its_queue(deploy):
    asyncio.run(live_through_everything(deploy(SETTINGS)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_prefill_engines_on_ray_compute_prompts_for_the_others(deploy, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    secret.chmod(0o600)
    options = {**SETTINGS["options"], "arrivals": "64MiB"}
    settings = {"options": options, "prefill": {"replicas": 1, "secret_file": str(secret)}, "replicas": 1}
    asyncio.run(send_prompts_disaggregated(deploy({**settings, "cpus": 0.25, "ingress": {"cpus": 0.25}})))


async def send_prompts_disaggregated(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(WAIT)) as client:
        assert await Reader(client, "one", tokens=8).whole() == (8, "done")
        await until(lambda: are_up(client, 2))
        # Answers run while a long prompt arrives, so that computing it there costs twice.
        running = [Reader(client, f"{number} goes on") for number in range(SEATS - 1)]
        await until(lambda: all(reader.chunks >= 3 for reader in running))
        numbers = iter(range(1000))

        async def has_travelled() -> bool:
            # A prompt of its own each time: one goes apart when the rates seen so far say that it pays.
            words = " ".join(f"{next(numbers)} and {each}" for each in range(200))
            assert await Reader(client, words, tokens=4).whole() == (4, "done")
            return await sent_and_received(client) > 0

        await until(has_travelled)
        for reader in running:
            assert reader.end is None
            await reader.stop()


async def live_through_everything(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(WAIT)) as client:
        before = await announced()
        assert len(before) == 2
        await answers_stream_and_end_with_their_clients(client, before)
        await a_restarted_controller_interrupts_nothing(client)
        await a_death_fails_only_what_the_replica_had_begun(client, before)
        await more_requests_bring_a_replica_and_none_take_it_away(client)
        await an_ingress_that_dies_is_replaced_and_leaves_nothing_running(client)


async def answers_stream_and_end_with_their_clients(client: httpx.AsyncClient, replicas: Replicas) -> None:
    assert await Reader(client, "one", tokens=8).whole() == (8, "done")
    reader = Reader(client, "two")
    # The answer never ends by itself, so its tokens arrive before its end.
    await until(lambda: reader.chunks >= 3)
    assert await total_open(replicas) == 1
    await reader.stop()
    await until(lambda: nothing_open(replicas))


async def a_restarted_controller_interrupts_nothing(client: httpx.AsyncClient) -> None:
    reader = Reader(client, "while the controller is away")
    await until(lambda: reader.chunks >= 3)
    kill_one("CONTROLLER", restart=True)
    had = reader.chunks
    assert await Reader(client, "a new one", tokens=8).whole() == (8, "done")
    await until(lambda: are_running(2))
    await until(lambda: reader.chunks > had + 100)
    assert reader.end is None
    await reader.stop()


async def a_death_fails_only_what_the_replica_had_begun(client: httpx.AsyncClient, replicas: Replicas) -> None:
    readers = [Reader(client, f"{number} is a prompt of its own") for number in range(8)]
    await until(lambda: all_seats_taken(readers, replicas))
    begun = [reader for reader in readers if reader.chunks]
    victim = next(iter(replicas))
    assert await open_requests(replicas[victim]) > SEATS, "or none waits there that must be tried elsewhere"
    kill(victim)
    await until(lambda: sum(reader.end == "error" for reader in readers) == SEATS)
    others = [reader for reader in begun if reader.end is None]
    assert len(others) == SEATS, "the other replica's answers go on, and nothing that had not begun has failed"
    had = sum(reader.chunks for reader in others)
    await until(lambda: sum(reader.chunks for reader in others) > had + 100)
    # Each client that leaves frees a seat: all that waited begin, whichever replica they waited at.
    await leave_as_they_begin([reader for reader in readers if reader.end is None])
    assert sum(reader.end == "error" for reader in readers) == SEATS
    await until(lambda: are_announced(2, {victim}))
    await until(lambda: are_up(client, 2))


async def more_requests_bring_a_replica_and_none_take_it_away(client: httpx.AsyncClient) -> None:
    readers = [Reader(client, f"{number} of many") for number in range(8)]
    await until(lambda: are_up(client, 3))
    # The third replica has free seats, the others have none.
    assert await Reader(client, "a late one", tokens=8).whole() == (8, "done")
    await leave_as_they_begin(readers)
    replicas = await announced()
    await until(lambda: nothing_open(replicas))
    running = [Reader(client, f"{number} of few") for number in range(3)]
    await until(lambda: each_has_one(replicas))
    await until(lambda: are_running(2))
    # One of them is answered by the replica that ends.
    had = [reader.chunks for reader in running]
    await until(lambda: all(reader.chunks > before + 100 for reader, before in zip(running, had, strict=True)))
    assert [reader.end for reader in running] == [None] * 3
    for reader in running:
        await reader.stop()
    assert await Reader(client, "after", tokens=8).whole() == (8, "done")


async def an_ingress_that_dies_is_replaced_and_leaves_nothing_running(client: httpx.AsyncClient) -> None:
    replicas = await announced()
    reader = Reader(client, "its ingress dies")
    await until(lambda: reader.chunks >= 3)
    kill_one("ingress")
    await until(lambda: nothing_open(replicas))
    await asyncio.gather(reader.reading, return_exceptions=True)
    assert reader.end != "done"
    await until(lambda: are_up(client, 2))
    assert await Reader(client, "the next one", tokens=8).whole() == (8, "done")


# conditions -----------------------------------------------------------------------------------------------------------


async def total_open(replicas: Replicas) -> int:
    return sum([await open_requests(each) for each in replicas.values()])


async def each_has_one(replicas: Replicas) -> bool:
    return [await open_requests(each) for each in replicas.values()] == [1] * len(replicas)


async def nothing_open(replicas: Replicas) -> bool:
    return not await total_open(replicas)


async def all_seats_taken(readers: list[Reader], replicas: Replicas) -> bool:
    begun = sum(bool(reader.chunks) for reader in readers)
    return begun == len(replicas) * SEATS and await total_open(replicas) == len(readers)


async def leave_as_they_begin(readers: list[Reader]) -> None:
    left = list(readers)
    while left:
        await until(lambda: any(reader.chunks for reader in left))
        for reader in [reader for reader in left if reader.chunks]:
            assert reader.end is None
            left.remove(reader)
            await reader.stop()


async def are_announced(count: int, without: set[str]) -> bool:
    return len((await announced()).keys() - without) >= count


async def are_up(client: httpx.AsyncClient, count: int) -> bool:
    """Return whether the ingress sends requests to this many replicas."""
    try:
        text = (await client.get("/metrics")).text
    except httpx.TransportError:
        return False
    return sum(line.startswith("weft_replica_up{") and line.endswith(" 1.0") for line in text.splitlines()) == count


async def sent_and_received(client: httpx.AsyncClient) -> int:
    """The bytes of prefixes that have arrived at the decode engine."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = [line.split() for line in lines if line.startswith("weft_transfer_received_bytes_total")]
    return int(sum(float(value) for _, value in found))


async def are_running(count: int) -> bool:
    from ray import serve

    status = await asyncio.to_thread(serve.status)
    return status.applications["weft"].deployments["engine"].replica_states.get("RUNNING", 0) == count
