"""A server under more load than its memory holds: no error, no growth, and an audit after every step.

WEFT_LOAD_SECONDS says how long the slow version lasts; ten minutes if it says nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers.held_steps import wait_until
from tests.support.servers.serving import Served, serving

CLIENTS = 24
KEY = "load"
# Memory for about a dozen of the sequences that run at once.
SMALL = ("--memory", "4MiB", "--max-length", "1024", "--max-sequences", "24", "--max-tokens-per-step", "512")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Seen:
    """What the clients met."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)


def resident_bytes(served: Served) -> int:
    """Of the front and the engine together."""
    processes = (served.process.pid, *served.children)
    return sum(int(Path(f"/proc/{number}/statm").read_text().split()[1]) for number in processes) * PAGE


def make_body(dice: random.Random) -> dict[str, Any]:
    """Some of few long beginnings, then something of its own; mostly short answers, sometimes long ones."""
    stem = random.Random(dice.randrange(6))
    prompt = [stem.randrange(256) for _ in range(stem.randrange(10, 300))]
    prompt += [dice.randrange(256) for _ in range(dice.randrange(1, 100))]
    body = {"prompt": prompt, "max_tokens": dice.choice([1, 8, 40, 200]), "ignore_eos": True, "temperature": 0.7}
    return body | {"seed": dice.randrange(1000), "priority": dice.choice([0, 0, 0, 1])}


async def client(url: str, number: int, enough: Callable[[], bool], seen: Seen) -> None:
    dice = random.Random(number)
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=600) as http:
        while not enough() and not seen.problems:
            body, way = make_body(dice), dice.choice(["plain", "stream", "stream", "hang up", "cancel"])
            try:
                await globals()[way.replace(" ", "_")](http, body, dice, seen)
            except (httpx.HTTPError, AssertionError) as error:
                seen.problems.append(f"{way}: {error!r}")
            seen.outcomes[way] += 1


async def plain(http: httpx.AsyncClient, body: dict[str, Any], dice: random.Random, seen: Seen) -> None:
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]


async def stream(http: httpx.AsyncClient, body: dict[str, Any], dice: random.Random, seen: Seen) -> None:
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    assert not any('"error"' in line for line in lines)
    assert '"finish_reason":"length"' in lines[-2]


async def hang_up(http: httpx.AsyncClient, body: dict[str, Any], dice: random.Random, seen: Seen) -> None:
    """Somewhere in the middle of an answer."""
    left = dice.randrange(1, 20)
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 300}) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            left -= 1
            if not left:
                return


async def cancel(http: httpx.AsyncClient, body: dict[str, Any], dice: random.Random, seen: Seen) -> None:
    """Before anything has come, perhaps."""
    request = asyncio.ensure_future(http.post("/v1/completions", json=body | {"max_tokens": 300}))
    await asyncio.sleep(dice.random() * 0.3)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def watch(served: Served, enough: Callable[[], bool], seen: Seen) -> None:
    while not enough() and not seen.problems:
        seen.resident.append(resident_bytes(served))
        await asyncio.sleep(0.2)


async def load(served: Served, requests: int, seconds: float) -> Seen:
    """At least so many requests, for at least so long."""
    seen, loop = Seen(), asyncio.get_running_loop()
    until = loop.time() + seconds

    def enough() -> bool:
        return seen.outcomes.total() >= requests and loop.time() >= until

    clients = [client(served.url, number, enough, seen) for number in range(CLIENTS)]
    await asyncio.gather(watch(served, enough, seen), *clients)
    return seen


def metrics(served: Served) -> dict[str, float]:
    """Values by name, summed over labels, and by name and label."""
    found: Counter[str] = Counter()
    status, text = served.call("/metrics", key=KEY)
    assert status == 200, text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
            for label, value in sample.labels.items():
                found[f"{sample.name} {label}={value}"] += sample.value
    return found


def quiet(served: Served) -> dict[str, float]:
    """The numbers once nothing runs any more."""
    at_rest = ("weft_sequences_running", "weft_sequences_waiting", "weft_requests_open")
    wait_until(lambda: not any(metrics(served)[name] for name in at_rest))
    return metrics(served)


def check_load(growth_bytes: int, requests: int = 0, seconds: float = 0.0) -> None:
    with serving(*SMALL, "--api-key", KEY, "--paranoid", OMP_NUM_THREADS="1") as served:
        seen = asyncio.run(load(served, requests, seconds))
        assert not seen.problems, seen.problems[:3]
        assert min(seen.outcomes.values()) > 0
        found = quiet(served)
        for name in ("evictions", "aborts", "cached_tokens"):
            assert found[f"weft_{name}_total"] > 0, f"the load was too light: no {name}"
        assert found["weft_evictions_total kind=page"] > 0 < found["weft_evictions_total kind=resume_point"]
        assert found["weft_requests_total reason=error"] == 0
        assert not [name for name in found if name.startswith("weft_http_requests_total status=5")]
        # Nobody runs: nothing may be held but by the cache, and that lets go of everything.
        assert found["weft_leases"] == found["weft_memory_units use=live"] == 0
        assert served.call("/flush_cache", {}, key=KEY)[1]["cached_tokens"] == 0
        empty = metrics(served)
        assert empty["weft_memory_units"] == empty["weft_memory_slabs_used"] == empty["weft_cache_cells"] == 0
        check_growth(seen.resident, growth_bytes)
        assert served.call("/health", key=KEY)[0] == 200
        assert served.stop() == 0
        told = served.errors.read_text()
        assert "Traceback" not in told, told[-2000:]
        assert "ERROR" not in told, told[-2000:]


def check_growth(resident: list[int], growth_bytes: int) -> None:
    """After a warm-up of a third, the end is no larger than the beginning."""
    warm = resident[len(resident) // 3 :]
    part = max(1, len(warm) // 4)
    begin, end = mean(warm[:part]), mean(warm[-part:])
    assert end - begin < growth_bytes, f"grew from {begin / 2**20:.1f} to {end / 2**20:.1f} MiB"


def test_growth_would_be_seen() -> None:
    steady = [100 << 20] * 120
    check_growth(steady, 1 << 20)
    with pytest.raises(AssertionError, match="grew"):
        check_growth([size + (i << 16) for i, size in enumerate(steady)], 1 << 20)


@pytest.mark.thorough
def test_sixty_requests_for_more_than_memory_holds() -> None:
    check_load(48 << 20, requests=60)


@pytest.mark.slow
def test_ten_minutes_of_more_than_memory_holds() -> None:
    check_load(8 << 20, seconds=float(os.environ.get("WEFT_LOAD_SECONDS", "600")))
