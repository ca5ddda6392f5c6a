"""Limits per key: what counts, what is given back, what a client beyond its limit is answered. Time is the test's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers.asgi import Exchange, PacedEngine, application
from tests.support.servers.fake_engines import InstantEngine
from weft.answers.followed import FollowedAnswer
from weft.base.sampling import SamplingParams
from weft.engine.events import Report
from weft.engine.request import Request
from weft.server.access.auth import Keys, Tenant
from weft.server.access.keys import Key, RateLimits
from weft.server.access.rates import RATE_HEADERS, Account, Bucket, RateLimited, Used
from weft.server.front import AskedPrompt
from weft.server.generation import Generation
from weft.server.metrics.registry import Metrics
from weft.server.settings import Limits, ServerSettings
from weft.server.texts.prompt_builder import Prompt


class Hand:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hand:
    return Hand()


# buckets and accounts -------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**6)), max_size=30))
def test_no_minute_gives_more_than_twice_the_limit(per_minute, asked):
    """A full bucket and what flows in: taken is never more than that."""
    clock = Hand()
    bucket, began, taken = Bucket(per_minute, clock), clock.now, 0
    for pause, amount in asked:
        clock.now += pause
        if bucket.wait_seconds(amount) == 0:
            bucket.take(amount)
            taken += amount
        flowed = per_minute * (clock.now - began) / 60
        assert taken <= per_minute + flowed + 1e-6 * per_minute
        assert 0 <= bucket.balance <= per_minute


def test_waiting_as_long_as_told_is_enough_and_less_is_not(clock):
    account = Account(RateLimits(requests_per_minute=30), clock)
    for _ in range(30):
        account.take_request()
    with pytest.raises(RateLimited, match="30 requests a minute, 0 left, 1 needed") as raised:
        account.take_request()
    assert raised.value.retry_seconds == 2
    clock.now += 1.9
    with pytest.raises(RateLimited):
        account.take_request()
    clock.now += 0.1
    account.take_request()
    assert account.requests == 33
    assert account.limited == {"requests": 2, "tokens": 0}


def test_tokens_are_reserved_and_those_not_used_are_given_back(clock):
    account = Account(RateLimits(tokens_per_minute=1000), clock)
    reserved = account.reserve(100, 500)
    assert reserved == 600
    with pytest.raises(RateLimited, match="400 left, 401 needed"):
        account.reserve(1, 400)
    # 64 of the prompt were cached, 20 were generated.
    account.settle(reserved, Used(100, 64, 20))
    assert remaining(account) == 1000 - 36 - 20
    assert account.tokens == {"prompt": 100, "cached": 64, "generated": 20}


def test_a_fork_pays_for_the_answer_that_it_goes_on_with(clock):
    account = Account(RateLimits(tokens_per_minute=1000), clock)
    prompt, before = np.zeros(10, np.int32), np.zeros(800, np.int32)
    params = SamplingParams(max_tokens=5)
    generation = Generation((), Tenant(), None, Metrics())
    generation.sequences = [FollowedAnswer(Request(prompt, params, answered=before), None, 0)]
    generation.sequences[0].report = Report(cached_tokens=768)
    used = generation.used()
    assert (used.prompt, used.cached, used.charged) == (810, 768, 42)
    asked = AskedPrompt(Prompt(prompt), params, answered=before)
    account.settle(account.reserve(asked.known_length, 5), used)
    assert remaining(account) == 1000 - 42


def test_an_answer_without_a_bound_may_start_and_is_paid_for_when_it_was_longer(clock):
    account = Account(RateLimits(tokens_per_minute=1000), clock)
    reserved = account.reserve(10, 30000)
    assert reserved == 1000
    account.settle(reserved, Used(10, 0, 2990))
    assert remaining(account) == 0
    clock.now += 120
    with pytest.raises(RateLimited, match=r"in 0\.1 s"):
        account.reserve(1, 1)
    clock.now += 1
    account.reserve(1, 1)


def test_a_prompt_that_never_fits_says_so(clock):
    account = Account(RateLimits(tokens_per_minute=1000), clock)
    with pytest.raises(RateLimited, match="the prompt has 1001 tokens, but this key may use 1000 a minute"):
        account.reserve(1001, 1)
    assert remaining(account) == 1000


def test_a_changed_limit_keeps_what_was_used(clock):
    account = Account(RateLimits(10, 1000), clock)
    account.take_request()
    account.reserve(100, 100)
    account.change(RateLimits(20, 0))
    assert values(account) == {"limit-requests": "20", "remaining-requests": "19", "reset-requests": "3.000s"}
    account.change(RateLimits())
    assert account.headers() == []
    account.take_request()
    assert account.reserve(10**9, 10**9) == 0


def remaining(account: Account) -> int:
    return int(values(account)["remaining-tokens"])


def values(account: Account) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in account.headers()}


# over HTTP ------------------------------------------------------------------------------------------------------------


def limited(**rates: int) -> ServerSettings:
    return ServerSettings(api_keys=(Key("one", "alice", RateLimits(**rates)), Key("two", "bob")), admin_key="root")


def completion(app: Any, key: str = "one", **body: Any) -> Exchange:
    return Exchange(app, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, **body}, key)


def test_requests_beyond_the_limit_get_a_429_that_says_when_to_come_back(clock):
    settings = limited(requests_per_minute=2)

    async def ask() -> None:
        async with application(settings, keys=Keys(settings, clock)) as app:
            first = await Exchange(app, "/v1/models", key="one").answer()
            assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
            # What is refused for other reasons counts too, and before anything of it is read.
            assert (await completion(app, temperature=-1).answer()).status == 400
            refused = await completion(app).answer()
            assert refused.status == 429
            error = refused.json["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert refused.headers["retry-after"] == "30"
            assert refused.headers["x-ratelimit-limit-requests"] == "2"
            assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
            assert "alice" not in refused.body.decode()
            # Others have their own, and health has none.
            other = await completion(app, "two").answer()
            assert other.status == 200
            assert not set(RATE_HEADERS) & set(other.headers)
            assert (await Exchange(app, "/health", key="one").answer()).status == 200
            clock.now += 30
            assert (await completion(app).answer()).status == 200

    asyncio.run(ask())


def test_tokens_beyond_the_limit_get_a_429_and_a_stream_shows_what_is_left(clock):
    settings = limited(tokens_per_minute=20)

    async def ask() -> None:
        async with application(settings, keys=Keys(settings, clock)) as app:
            asked = await completion(app, stream=True).answer()
            # Its headers leave when it starts: prompt and answer are reserved.
            assert (asked.status, asked.headers["x-ratelimit-remaining-tokens"]) == (200, "12")
            assert (await completion(app, max_tokens=10).answer()).status == 429
            assert (await completion(app, n=2).answer()).status == 429
            exact = await completion(app, max_tokens=9).answer()
            assert (exact.status, exact.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
            assert (await completion(app, prompt=list(range(21))).answer()).status == 429

    asyncio.run(ask())


class CachingEngine(InstantEngine):
    """Says that all of a prompt but its last token was cached."""

    def report(self, number: int) -> Report:
        found = super().report(number)
        return Report(cached_tokens=self._prompt_tokens - 1, miss=found.miss)

    def add(self, request: Any, constraint: None = None) -> int:
        self._prompt_tokens = len(request.prompt)
        return super().add(request, constraint)


def test_what_a_request_did_not_use_is_given_back_however_it_ends(clock):
    settings = limited(tokens_per_minute=100)

    async def left_after(asked: Exchange, keys: Keys) -> str:
        await asked.answer()
        return values(keys.tenants[0].account)["remaining-tokens"]

    async def ask() -> None:
        keys = Keys(settings, clock)
        async with application(settings, keys=keys) as app:
            # 3 of the prompt and 5 of the answer, though 90 were reserved; a stop token ends it.
            stopped = completion(app, max_tokens=87, stop_token_ids=[8], ignore_eos=False)
            assert await left_after(stopped, keys) == "92"
            # Refused by the bounds, busy, or by the engine: nothing was used.
            assert await left_after(completion(app, max_tokens=50, temperature=-1), keys) == "92"
            assert await left_after(completion(app, max_tokens=9, n=33), keys) == "92"
        keys = Keys(settings, clock)
        async with application(settings, CachingEngine(), keys=keys) as app:
            assert await left_after(completion(app, prompt=list(range(64))), keys) == str(100 - 1 - 5)

    asyncio.run(ask())


def test_a_client_that_leaves_pays_for_what_it_got(clock):
    settings = limited(tokens_per_minute=100)
    engine = PacedEngine()

    async def ask() -> None:
        keys = Keys(settings, clock)
        async with application(settings, engine, keys=keys) as app:
            asked = completion(app, max_tokens=90, stream=True)
            running = asked.start()
            engine.allow(1)
            await asked.until(b"data: {")
            assert values(keys.tenants[0].account)["remaining-tokens"] == "7"
            asked.leave()
            await running
            assert values(keys.tenants[0].account)["remaining-tokens"] == "96"

    asyncio.run(ask())


def test_a_full_server_charges_nothing(clock):
    settings = ServerSettings(
        api_keys=(Key("one", "alice", RateLimits(tokens_per_minute=100)),), limits=Limits(open_sequences=1)
    )

    async def ask() -> None:
        keys = Keys(settings, clock)
        async with application(settings, keys=keys) as app:
            refused = await completion(app, n=2).answer()
            assert (refused.status, refused.json["error"]["code"]) == (429, "busy")
            assert values(keys.tenants[0].account)["remaining-tokens"] == "100"

    asyncio.run(ask())


def test_defaults_hold_for_keys_without_limits_and_for_all_clients_where_there_are_no_keys(clock):
    default = RateLimits(requests_per_minute=1)
    settings = ServerSettings(api_keys=("one", Key("two", "bob", RateLimits(0))), admin_key="root", key_rates=default)

    async def statuses(app: Any, *keys: str | None) -> list[int]:
        return [(await Exchange(app, "/v1/models", key=key).answer()).status for key in keys]

    async def ask() -> None:
        async with application(settings, keys=Keys(settings, clock)) as app:
            assert await statuses(app, "one", "one", "two", "two", "root", "root") == [200, 429, 200, 200, 200, 200]
        keyless = ServerSettings(key_rates=default)
        async with application(keyless, keys=Keys(keyless, clock)) as app:
            assert await statuses(app, None, None) == [200, 429]

    asyncio.run(ask())


def test_metrics_name_keys_and_show_none(clock):
    settings = limited(requests_per_minute=2, tokens_per_minute=20)

    async def ask() -> str:
        async with application(settings, keys=Keys(settings, clock)) as app:
            for key in ("one", "one", "one", "two", "wrong"):
                await completion(app, key, max_tokens=12).answer()
            return (await Exchange(app, "/metrics", key="root").answer()).body.decode()

    text = asyncio.run(ask())
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("weft_key_")
    }
    assert found["weft_key_requests_total", "alice"] == 3
    assert found["weft_key_requests_total", "bob"] == 1
    assert found["weft_key_tokens_total", "alice", "prompt"] == 3
    assert found["weft_key_tokens_total", "alice", "generated"] == 12
    assert found["weft_key_limited_total", "alice", "tokens"] == 1
    assert found["weft_key_limited_total", "alice", "requests"] == 1
    assert {labels[1] for labels in found} == {"alice", "bob", "admin"}


def test_openais_client_reads_the_error_and_its_wait():
    import openai

    from tests.support.servers.http_server import serving

    with serving(limited(requests_per_minute=1)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0)
        client.models.list()
        with pytest.raises(openai.RateLimitError) as raised:
            client.models.list()
        assert raised.value.code == "rate_limit_exceeded"
        assert raised.value.request_id
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
