"""Requests that go over a prefill engine: members that act when a test says so, and fail as it says."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from tests.support.hashed.disaggregated import make_pair
from tests.support.servers.backends import in_loop
from tests.support.servers.fake_engines import answer, fake_info
from tests.support.servers.fake_members import Clock, CountedChoice, FakeMember, turns
from tests.support.tiers.disk_blocks import IDENTITY
from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, RequestError
from weft.base.sampling import SamplingParams
from weft.base.transfers import Destination
from weft.cli.serve import ServeOptions, transfer_of
from weft.engine.events import FinishReason, Output, Report
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews, Outputs
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.pairing import destination_of
from weft.fleet.routing import RoutedChoice
from weft.start.disaggregated import join

PREFILL, DECODE = {"role": "prefill"}, {"role": "decode", "transfer": {"port": 7000, "secure": False}}


def member_of(role: dict) -> FakeMember:
    return FakeMember(fake_info(exact=False, **role))


def shaped(role: dict, ranks: int) -> dict:
    """The facts of a role whose engine has this many ranks."""
    found = role | {"tensor_parallel": ranks}
    if "transfer" in role:
        found["transfer"] = role["transfer"] | {"further_ports": [7000 + rank for rank in range(1, ranks)]}
    return found


def long_request(seed: int = 0, count: int = 3) -> Request:
    prompt = np.random.default_rng(seed).integers(0, 50, 200).astype(np.int32)
    return Request(prompt, SamplingParams(max_tokens=count, temperature=0.0))


def short_request(count: int = 3) -> Request:
    return Request(np.arange(20, dtype=np.int32), SamplingParams(max_tokens=count, temperature=0.0))


def finish_prefills(member: FakeMember, finish: FinishReason = FinishReason.LENGTH) -> None:
    """Let a prefill engine report that it has sent all prompts that it has, or failed to."""
    for number in list(member.running):
        del member.running[number]
        member._receive(Outputs([Output(number, None, finish=finish)], {number: Report()}))


class Disaggregated:
    def __init__(self, prefillers: int = 1, decoders: int = 1, chooser=None, roles=None) -> None:
        members = [member_of(role) for role in roles or [PREFILL] * prefillers + [DECODE] * decoders]
        self.prefillers, self.decoders = members[:prefillers], members[prefillers:]
        named = [(f"p{i}", each) for i, each in enumerate(self.prefillers)]
        named += [(f"d{i}", each) for i, each in enumerate(self.decoders)]
        self.choice = chooser or CountedChoice()
        self.clock = Clock()
        self.fleet = FleetBackend(named, chooser=self.choice, check_seconds=None, clock=self.clock)

    async def step(self, *members: FakeMember, generate: bool = True) -> None:
        for member in members or (*self.prefillers, *self.decoders):
            member.step(generate=generate)
        await turns()

    async def submit(self, request: Request) -> asyncio.Task[list[int]]:
        self.streams: list[OutputStream] = []
        streams = self.streams

        async def read() -> list[int]:
            stream = await self.fleet.submit(request)
            streams.append(stream)
            return [o.token async for outputs in stream for o in outputs if o.token is not None]

        task = asyncio.ensure_future(read())
        await turns()
        return task

    def assert_nothing_left(self) -> None:
        assert self.fleet.open == 0
        assert all(not member.streams for member in self.fleet.members)
        assert not isinstance(self.choice, CountedChoice) or self.choice.placed_now == []


@asynccontextmanager
async def disaggregated(**more):
    found = Disaggregated(**more)
    await found.fleet.start()
    try:
        yield found
    finally:
        await found.fleet.stop(0)


@in_loop
async def test_a_long_prompt_is_computed_by_the_prefill_engine_and_answered_by_the_decode_engine():
    async with disaggregated() as both:
        request = long_request()
        reading = await both.submit(request)
        [prefiller], [decoder] = both.prefillers, both.decoders
        await both.step(prefiller, generate=False)
        [leg] = prefiller.accepted
        assert leg.prompt.tolist() == request.prompt[:192].tolist()
        assert leg.send_to == Destination("127.0.0.1", 7000)
        assert leg.params.max_tokens == 0
        assert decoder.sent == [], "it was sent before its prompt was"
        finish_prefills(prefiller)
        await turns()
        for _ in range(4):
            await both.step(decoder)
        assert decoder.accepted == [request]
        assert await reading == answer(request.prompt.tolist(), 3)
        both.assert_nothing_left()


@in_loop
async def test_short_prompts_and_those_that_are_scored_or_embedded_stay_on_the_decode_engine():
    async with disaggregated() as both:
        prompt = long_request().prompt
        scored = Request(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
        embedded = Request(prompt, SamplingParams(max_tokens=0, vector_from=len(prompt) - 1))
        tasks = [await both.submit(each) for each in (short_request(), scored, embedded)]
        for _ in range(4):
            await both.step()
        await asyncio.gather(*tasks)
        assert both.prefillers[0].sent == []
        assert len(both.decoders[0].accepted) == 3


@pytest.mark.parametrize("how", ["dies", "is full", "hangs", "fails to send"])
@in_loop
async def test_without_its_prefill_engine_a_request_tries_another_one_once_then_computes_it_all(how):
    async with disaggregated(prefillers=3) as both:
        request = long_request()
        reading = await both.submit(request)
        for _ in range(2):
            busy = [each for each in both.prefillers if not each.sick and (each.inbox or each.running)]
            if how == "fails to send" or not busy:
                break
            [prefiller] = busy
            if how == "is full":
                prefiller.full = True
                await both.step(prefiller)
            elif how == "dies":
                await both.step(prefiller, generate=False)
                prefiller.die()
                await turns()
            else:
                await both.step(prefiller, generate=False)
                prefiller.sick = True
                both.fleet.check()
                await turns()
        if how == "fails to send":
            await both.step(*both.prefillers, generate=False)
            for each in both.prefillers:
                finish_prefills(each, FinishReason.ERROR)
            await turns()
        tried = sum(len(each.sent) for each in both.prefillers)
        assert tried == (1 if how == "fails to send" else 2)
        for _ in range(4):
            await both.step(*both.decoders)
        assert await reading == answer(request.prompt.tolist(), 3)
        both.assert_nothing_left()


@in_loop
async def test_a_decode_engine_lost_before_the_first_token_is_replaced_by_way_of_the_prefill_engine():
    async with disaggregated(decoders=2) as both:
        request = long_request()
        reading = await both.submit(request)
        [prefiller] = both.prefillers
        await both.step(prefiller, generate=False)
        first = prefiller.accepted[0].send_to
        both.decoders[0].die()
        both.decoders[1].revive()
        finish_prefills(prefiller)
        await turns()
        for _ in range(8):
            await both.step(prefiller, generate=False)
            finish_prefills(prefiller)
            await both.step(*both.decoders)
        assert first is not None
        assert await reading == answer(request.prompt.tolist(), 3)
        both.assert_nothing_left()


@pytest.mark.parametrize("how", ["hangs", "is removed", "ends for good"])
@in_loop
async def test_a_prompt_on_its_way_to_a_decode_engine_that_is_given_up_goes_to_another_one_at_once(how):
    async with disaggregated(decoders=2) as both:
        request = long_request()
        reading = await both.submit(request)
        [prefiller] = both.prefillers
        await both.step(prefiller, generate=False)
        lost = next(each for each in both.fleet.members if each.streams and each.name.startswith("d"))
        if how == "is removed":
            both.fleet.remove(lost.name, drain_seconds=60)
        elif how == "ends for good":
            lost.backend.die(for_good=True)
        else:
            lost.backend.sick = True
            both.fleet.check()
        await turns()
        # The prefill engine itself does not know, and would go on sending until its connection times out.
        await both.step(prefiller, generate=False)
        assert len(prefiller.aborted) == 1
        assert len(prefiller.running) == 1, "the prompt for the other one"
        finish_prefills(prefiller)
        await turns()
        for _ in range(4):
            await both.step(*both.decoders)
        assert await reading == answer(request.prompt.tolist(), 3)
        assert lost.retries == 1
        both.assert_nothing_left()


@in_loop
async def test_a_decode_engine_ejected_while_the_prefill_engine_accepts_a_prompt_is_given_up():
    async with disaggregated() as both:
        reading = await both.submit(long_request())
        [prefiller], [decoder] = both.prefillers, both.decoders
        assert len(prefiller.sent) == 1
        decoder.sick = True
        both.fleet.check()
        await both.step(prefiller, generate=False)
        await both.step(prefiller, generate=False)
        assert len(prefiller.aborted) == 1
        with pytest.raises(EngineStopped):
            await reading
        both.assert_nothing_left()


@in_loop
async def test_reports_name_the_role_of_each_member_and_none_of_the_fleet(caplog):
    with caplog.at_level("INFO"):
        async with disaggregated() as both:
            asked = asyncio.ensure_future(both.fleet.stats())
            await turns()
            await both.step()
            replicas = (await asked)["replicas"]
            assert {name: facts["role"] for name, facts in replicas.items()} == {"p0": "prefill", "d0": "decode"}
            assert not {"role", "transfer"} & both.fleet.info.settings.keys()
    assert "replica p0 is ready: role prefill" in caplog.text
    assert "replica d0 is ready: role decode" in caplog.text


@pytest.mark.parametrize("stage", ["offered", "prefilling", "decoding"])
@in_loop
async def test_an_abort_at_any_stage_frees_both(stage):
    async with disaggregated() as both:
        request = long_request()
        [prefiller], [decoder] = both.prefillers, both.decoders
        reading = await both.submit(request)
        if stage != "offered":
            await both.step(prefiller, generate=False)
        if stage == "decoding":
            finish_prefills(prefiller)
            await turns()
            await both.step(decoder, generate=False)
        if stage == "offered":
            reading.cancel()
        else:
            both.fleet.abort(both.streams[0])
        await turns()
        for _ in range(3):
            await both.step(generate=False)
        assert not prefiller.running
        assert not decoder.running
        await asyncio.gather(reading, return_exceptions=True)
        both.assert_nothing_left()


@in_loop
async def test_a_fleet_of_prefill_engines_alone_answers_nothing():
    async with disaggregated() as both:
        both.decoders[0].die()
        both.fleet.check()
        assert not both.fleet.healthy
        with pytest.raises(EngineStopped):
            await both.fleet.submit(long_request())
        both.assert_nothing_left()


@in_loop
async def test_a_fleet_whose_decode_engines_have_ended_for_good_has_failed():
    async with disaggregated() as both:
        waiting = asyncio.ensure_future(both.fleet.wait_failed())
        both.decoders[0].die(for_good=True)
        assert "all replicas have ended" in await waiting


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ERROR])
@in_loop
async def test_a_prompt_that_was_not_sent_counts_as_work_of_the_decode_engine(finish):
    async with disaggregated(chooser=RoutedChoice()) as both:
        [prefiller], [decoder], view = both.prefillers, both.decoders, both.choice.router.replicas["d0"]
        for member, running in ((prefiller, 0), (decoder, 5)):
            member._receive(EngineNews(None, ReplicaLoad(token_seconds=0.001, running=running)))
        task = await both.submit(long_request())
        await both.step(prefiller, generate=False)
        assert [each.work.tokens for each in view.unstarted.values()] == [200 - 192]
        finish_prefills(prefiller, finish)
        await turns()
        [booked] = view.unstarted.values()
        assert booked.work.tokens == (8 if finish is FinishReason.LENGTH else 200)
        for _ in range(4):
            await both.step(decoder)
        await task


@in_loop
async def test_the_router_sends_a_prompt_over_a_prefill_engine_if_that_is_estimated_to_pay():
    def load(rate: float, running: int) -> EngineNews:
        return EngineNews(None, ReplicaLoad(token_seconds=1 / rate, running=running))

    async with disaggregated(chooser=RoutedChoice()) as both:
        [prefiller], [decoder] = both.prefillers, both.decoders
        # As fast, and answers run on the decode engine: they would wait.
        for member, running in ((prefiller, 0), (decoder, 5)):
            member._receive(load(1000.0, running))
        # What a fork goes on with lies on the decode engine.
        forked = msgspec.structs.replace(long_request(3, 1), answered=np.arange(5, dtype=np.int32))
        third = await both.submit(forked)
        assert (len(prefiller.sent), len(decoder.sent)) == (0, 1)
        first = await both.submit(long_request(1, 1))
        assert (len(prefiller.sent), len(decoder.sent)) == (1, 1)
        # No answer would wait, and the prefill engine is a hundred times slower.
        for member, rate in ((prefiller, 10.0), (decoder, 1000.0)):
            for _ in range(500):
                member._receive(load(rate, 0))
        second = await both.submit(long_request(2, 1))
        assert (len(prefiller.sent), len(decoder.sent)) == (1, 2)
        for _ in range(4):
            await both.step(prefiller, generate=False)
            finish_prefills(prefiller)
            await both.step(decoder)
        await asyncio.gather(first, second, third)
        assert both.choice.router.pending == 0


async def random_journeys(seed: int, requests: int, chooser=None) -> dict[str, int]:
    """Random requests over members that fail at random: each is answered or refused once, and nothing is left."""
    choose = Random(seed)
    both = Disaggregated(prefillers=2, decoders=2, chooser=chooser)
    fleet, members = both.fleet, [*both.prefillers, *both.decoders]
    await fleet.start()
    tasks: list[asyncio.Task[list[int]]] = []
    asked: list[Request] = []
    while len(asked) < requests or not all(task.done() for task in tasks):
        if len(asked) < requests and choose.random() < 0.5:
            asked.append(long_request(len(asked), choose.randint(1, 4)) if choose.random() < 0.8 else short_request())
            tasks.append(await both.submit(asked[-1]))
            if choose.random() < 0.1:
                tasks[-1].cancel()
            elif choose.random() < 0.1 and both.streams:
                fleet.abort(both.streams[0])
                tasks[-1].cancel()
        victim, roll = choose.choice(members), choose.random()
        if len(asked) >= requests or roll < 0.3:
            victim.revive()
        elif roll < 0.36:
            victim.die()
        elif roll < 0.4:
            victim.sick = True
        elif roll < 0.44:
            victim.full = True
        for member in choose.sample(members, choose.randrange(5)):
            member.step(generate=member in both.decoders)
            if member in both.prefillers and choose.random() < 0.5:
                finish_prefills(member, choose.choice([FinishReason.LENGTH, FinishReason.ERROR]))
        both.clock.now += choose.random()
        fleet.check()
        await turns(choose.randrange(4))
    outcomes = {"answered": 0, "refused": 0, "cancelled": 0}
    for request, task in zip(asked, tasks, strict=True):
        if task.cancelled():
            outcomes["cancelled"] += 1
        elif task.exception() is not None:
            assert isinstance(task.exception(), EngineStopped | RequestError)
            outcomes["refused"] += 1
        else:
            assert task.result() == answer(request.prompt.tolist(), request.params.max_tokens)
            outcomes["answered"] += 1
    for _ in range(20):
        for member in members:
            member.revive()
            member.step(generate=False)
        await turns()
    both.assert_nothing_left()
    assert all(not member.running for member in members)
    await fleet.stop(0)
    return outcomes


@pytest.mark.parametrize("seed", range(4))
@in_loop
async def test_random_deaths_on_either_side_lose_no_request_and_leak_nothing(seed):
    outcomes = await random_journeys(seed, 60)
    assert outcomes["answered"] > 10


@in_loop
async def test_random_deaths_on_either_side_leave_nothing_in_the_router():
    chooser = RoutedChoice()
    await random_journeys(9, 60, chooser)
    assert chooser.router.pending == 0
    assert chooser._ranked == {}


@pytest.mark.slow
@in_loop
async def test_ten_thousand_requests_over_dying_members_of_both_roles():
    outcomes = await random_journeys(1, 10_000)
    assert outcomes["answered"] > 3000


@in_loop
async def test_decode_engines_drop_after_the_prefill_engines_that_could_send_it_again():
    async with disaggregated(prefillers=2, decoders=2) as found:
        dropping = asyncio.ensure_future(found.fleet.drop(b"t" * 16, None))
        await turns()
        assert [len(each.inbox) for each in found.prefillers] == [1, 1]
        await found.step(found.prefillers[0])
        assert [len(each.inbox) for each in found.decoders] == [0, 0]
        await found.step(found.prefillers[1])
        assert [len(each.inbox) for each in found.decoders] == [1, 1]
        await found.step(*found.decoders)
        assert (await dropping)["dropped_tokens"] == {"device": 4 * 64}


@in_loop
async def test_prompts_go_to_prefill_engines_of_the_same_shape_and_a_mismatch_is_logged_once_by_name(caplog):
    roles = [shaped(PREFILL, 1), shaped(PREFILL, 2), shaped(DECODE, 2)]
    async with disaggregated(prefillers=2, roles=roles) as found:
        (other, same), [decoder] = found.prefillers, found.decoders
        for seed in range(2):
            reading = await found.submit(long_request(seed))
            await found.step(same, generate=False)
            assert (len(other.sent), len(same.accepted)) == (0, seed + 1)
            finish_prefills(same)
            await turns()
            for _ in range(4):
                await found.step(decoder)
            await reading
        assert len(decoder.accepted) == 2
    [record] = [each for each in caplog.records if each.levelname == "WARNING"]
    complaint = "prefill engine p0 has --tensor-parallel 1 and cannot send prefixes to d0, which has 2"
    assert record.getMessage().startswith(complaint)


def test_every_rank_of_a_decode_engine_has_a_port():
    backend = SimpleNamespace(info=fake_info(exact=False, **shaped(DECODE, 3)), host="there")
    place = destination_of(SimpleNamespace(backend=backend))
    assert place == Destination("there", 7000, further_ports=(7001, 7002))


@pytest.mark.parametrize(
    ("listen", "host"),
    [(None, "router.example"), ("10.1.0.2:0", "10.1.0.2"), ("0.0.0.0:0", "router.example")],
)
def test_prompts_are_sent_to_the_interface_that_a_decode_engine_receives_them_on(listen, host, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("s" * 64)
    (tmp_path / "secret").chmod(0o600)
    options = {"role": "decode", "fleet_listen": "127.0.0.1:0", "fleet_secret": str(tmp_path / "secret")}
    settings = transfer_of(ServeOptions(**options, transfer_listen=listen))
    assert settings is not None
    bound = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr("weft.start.disaggregated.socket.create_server", lambda address, family: bound)
    workload = make_pair(0).workload
    loaded = SimpleNamespace(spec=workload.spec, identity=IDENTITY, config=workload.config)
    runner = SimpleNamespace(tiers=SimpleNamespace(area=None, area_units=None))
    joined = join(loaded, runner, settings)
    joined.transport.close()
    backend = SimpleNamespace(info=fake_info(exact=False, **joined.facts), host="router.example")
    place = destination_of(SimpleNamespace(backend=backend))
    assert place == Destination(host, joined.facts["transfer"]["port"])
