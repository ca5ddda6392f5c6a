"""A fleet answers every request once, whatever happens to its members."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import numpy as np
import pytest

from tests.support.fleet.fleets import (
    Fleet,
    check_a_silent_member_gives_up_what_it_has_not_begun,
    check_aborts_and_stops_reach_the_member_that_has_the_request,
    collect,
    fleet_of,
    prefix_of,
)
from tests.support.servers.backends import in_loop
from tests.support.servers.fake_engines import answer, fake_info
from tests.support.servers.fake_members import BAD, FakeMember, ask, random_traffic, turns
from weft.base.errors import EngineStopped, ModelError, RequestError
from weft.base.grid import CELL
from weft.fleet.backend import FleetBackend
from weft.fleet.choosing import LeastOpen
from weft.fleet.member import MemberState
from weft.fleet.routing import RoutedChoice
from weft.fleet.totals import merged_reports
from weft.fleet.warming import WantedPrefixes


@pytest.mark.parametrize("seed", range(4))
@in_loop
async def test_random_deaths_lose_no_request_answer_none_twice_and_leak_nothing(seed):
    ends = await random_traffic(seed, 150)
    assert ends["answered"] > 50
    assert ends["retried"] > 3
    assert ends["ejected"] > 3
    assert ends["cut"] > 0


@pytest.mark.slow
@in_loop
async def test_ten_thousand_requests_over_dying_members():
    total: Counter[str] = Counter()
    for seed in range(20):
        total.update(await random_traffic(100 + seed, 500, 2 + seed % 4))
    assert total["answered"] > 4000


@in_loop
async def test_requests_are_spread_over_the_members():
    async with fleet_of(3) as fleet:
        streams = [await fleet.submit([20], 50) for _ in range(6)]
        assert sorted(member.name for stream in streams if (member := stream.member)) == ["0", "0", "1", "1", "2", "2"]


@in_loop
async def test_a_member_that_dies_before_the_first_token_costs_a_retry_and_nothing_else():
    async with fleet_of() as fleet:
        task = asyncio.ensure_future(fleet.backend.submit(ask([20], 4)))
        await turns()
        first = next(member for member in fleet.members if member.inbox)
        first.die()
        stream = await fleet.finish(task)
        assert fleet.holder(stream) is not first
        assert await fleet.finish(asyncio.ensure_future(collect(stream))) == answer([20], 4)


@in_loop
async def test_a_member_that_dies_after_the_first_token_fails_only_what_it_has_begun():
    async with fleet_of() as fleet:
        one, other = await fleet.submit([20], 9), await fleet.submit([30], 9)
        assert await anext(one)
        reading = asyncio.ensure_future(collect(other))
        fleet.holder(one).die()
        with pytest.raises(EngineStopped):
            await collect(one)
        assert await fleet.finish(reading) == answer([30], 9)
        assert sum(len(member.accepted) for member in fleet.members) == 2, "nothing was retried"


@in_loop
async def test_an_accepted_request_that_is_not_begun_moves_when_its_member_dies():
    async with fleet_of() as fleet:
        task = asyncio.ensure_future(fleet.backend.submit(ask([20], 3)))
        await turns()
        for member in fleet.members:
            member.step(generate=False)
        stream = await task
        holder = fleet.holder(stream)
        holder.die()
        tokens = await fleet.finish(asyncio.ensure_future(collect(stream)))
        assert tokens == answer([20], 3)
        assert fleet.backend.members[fleet.members.index(holder)].retries == 1


def test_a_silent_member_gives_up_what_it_has_not_begun():
    check_a_silent_member_gives_up_what_it_has_not_begun()


@in_loop
async def test_a_request_at_fault_is_refused_once_and_a_full_member_is_passed_over():
    async with fleet_of() as fleet:
        with pytest.raises(RequestError, match="prompt is bad") as caught:
            await fleet.submit([BAD], 3)
        assert (caught.value.status, caught.value.field) == (400, "prompt")
        assert all(member.state is MemberState.UP for member in fleet.backend.members)
        fleet.members[0].full = True
        streams = [await fleet.finish(asyncio.ensure_future(fleet.backend.submit(ask([1], 3)))) for _ in range(3)]
        assert {fleet.holder(stream) for stream in streams} == {fleet.members[1]}
        fleet.members[1].full = True
        with pytest.raises(RequestError) as caught:
            await fleet.finish(asyncio.ensure_future(fleet.backend.submit(ask([1], 3))))
        assert caught.value.status == 429


@in_loop
async def test_a_request_that_ends_engines_is_not_tried_on_all_of_them():
    async with fleet_of(4) as fleet:
        task = asyncio.ensure_future(fleet.backend.submit(ask([20], 4)))
        deaths = 0
        while not task.done():
            await turns()
            for member in fleet.members:
                if member.inbox:
                    member.die()
                    deaths += 1
        with pytest.raises(EngineStopped):
            await task
        assert deaths == 2


@in_loop
async def test_the_fleets_own_queue_is_bounded():
    async with fleet_of(max_open=2) as fleet:
        first, _ = await fleet.submit([1], 9), await fleet.submit([2], 9)
        with pytest.raises(RequestError, match="limit of 2 open requests") as caught:
            await fleet.backend.submit(ask([3], 9))
        assert caught.value.status == 429
        fleet.backend.abort(first)
        assert await fleet.submit([3], 9)


def test_aborts_and_stops_reach_the_member_that_has_the_request():
    check_aborts_and_stops_reach_the_member_that_has_the_request()


@in_loop
async def test_an_ejected_member_returns_after_a_pause_that_doubles_once_it_answers():
    async with fleet_of() as fleet:
        member, sick = fleet.backend.members[0], fleet.members[0]
        for pause in (1, 2, 4):
            sick.die()
            fleet.backend.check()
            assert member.state is MemberState.EJECTED
            sick.revive()
            fleet.clock.now += pause - 0.5
            fleet.backend.check()
            await fleet.step()
            assert member.state is MemberState.EJECTED, "its pause is not over"
            fleet.clock.now += 1
            fleet.backend.check()
            await turns()
            assert member.state is MemberState.EJECTED, "it has not answered yet"
            await fleet.step()
            assert member.state is MemberState.UP
        fleet.clock.now += 1000
        sick.die()
        fleet.backend.check()
        sick.revive()
        fleet.clock.now += 1.5
        fleet.backend.check()
        await turns()
        await fleet.step()
        assert member.state is MemberState.UP, "a member that was up for long begins with the first pause again"


@in_loop
async def test_the_fleet_fails_for_good_only_with_its_last_member():
    async with fleet_of() as fleet:
        waiting = asyncio.ensure_future(fleet.backend.wait_failed())
        fleet.members[0].die(for_good=True)
        await turns()
        assert fleet.backend.healthy
        assert not waiting.done()
        fleet.members[1].die(for_good=True)
        assert "all replicas have ended" in await waiting
        assert not fleet.backend.healthy
        with pytest.raises(EngineStopped):
            await fleet.backend.submit(ask([1], 1))


@in_loop
async def test_stopping_lets_requests_finish_and_still_retries_but_takes_no_more():
    fleet = Fleet()
    await fleet.backend.start()
    task = asyncio.ensure_future(fleet.backend.submit(ask([20], 4)))
    await turns()
    stopping = asyncio.ensure_future(fleet.backend.stop(300))
    await turns()
    with pytest.raises(EngineStopped, match="shutting down"):
        await fleet.backend.submit(ask([1], 1))
    next(member for member in fleet.members if member.inbox).die()
    stream = await fleet.finish(task)
    assert not stopping.done()
    assert await fleet.finish(asyncio.ensure_future(collect(stream))) == answer([20], 4)
    await stopping


@in_loop
async def test_members_of_different_models_are_refused_by_name():
    named = [("0", FakeMember()), ("1", FakeMember(fake_info(exact=True)))]
    with pytest.raises(ModelError, match="replica 1 serves another model than replica 0: exact is True"):
        await FleetBackend(named, check_seconds=None).start()


@in_loop
async def test_numbers_of_a_fleet_are_sums_and_the_cache_report_says_who_holds_what():
    async with fleet_of() as fleet:
        asking = [asyncio.ensure_future(each) for each in (fleet.backend.stats(), fleet.backend.cache_report(5))]
        asking.append(asyncio.ensure_future(fleet.backend.flush()))
        await turns()
        await fleet.step()
        stats, report, left = await asyncio.gather(*asking)
        assert (stats["open"], stats["slab_bytes"], left) == (0, 4, 10)
        assert stats["replicas"]["1"]["up"] == 1
        assert report["cached_tokens"] == 256
        assert report["cell_tokens"] == 64
        assert set(report["prefixes"][0]["replicas"]) == {"0", "1"}
        assert fleet.backend.info.max_sequences == 2 * fake_info().max_sequences
        assert fleet.backend.info.memory_tokens == fake_info().memory_tokens


# members that come and go --------------------------------------------------------------------------------------------


@in_loop
async def test_a_removed_member_finishes_what_it_has_begun_and_gets_no_more():
    async with fleet_of() as fleet:
        streams = [await fleet.submit([20], 6), await fleet.submit([30], 6)]
        one = next(stream for stream in streams if stream.member.name == "0")
        fleet.backend.remove("0", 300)
        late = await fleet.submit([40], 3)
        assert late.member.name == "1"
        assert await fleet.finish(asyncio.ensure_future(collect(one))) == answer(one.request.prompt.tolist(), 6)
        await turns()
        assert [member.name for member in fleet.backend.members] == ["1"]
        assert fleet.members[0]._closed == "the server is shutting down"


@in_loop
async def test_a_new_member_computes_what_is_wanted_before_it_takes_requests():
    class Wanting(LeastOpen):
        def wanted(self):
            return [prefix_of([5]), prefix_of([6])]

    async with fleet_of(patient=True, chooser=Wanting()) as fleet:
        await turns()
        new = FakeMember()
        fleet.backend.add("2", new)
        await turns()
        assert fleet.backend.members[2].state is MemberState.WARMING
        streams = [await fleet.submit([20], 3) for _ in range(4)]
        assert {stream.member.name for stream in streams} <= {"0", "1"}
        fleet.members.append(new)
        while fleet.backend.members[2].state is MemberState.WARMING:
            await fleet.step()
        assert [request.prompt.tolist() for request in new.accepted] == [[5, 5], [6, 6]]
        assert (await fleet.submit([20], 3)).member.name == "2"


@in_loop
async def test_a_member_that_is_alone_takes_requests_before_it_computes_what_is_wanted():
    class Wanting(LeastOpen):
        def wanted(self):
            return [prefix_of([5])] * 9

    async with fleet_of(1, patient=True, chooser=Wanting()) as fleet:
        await turns()
        fleet.members[0].die()
        await turns()
        fleet.backend.check()
        fleet.members[0].revive()
        fleet.members[0].info = msgspec.structs.replace(fleet.members[0].info)
        fleet.clock.now += 1000.0
        fleet.backend.check()
        while fleet.backend.members[0].state is not MemberState.UP:
            await fleet.step()
        assert fleet.members[0].accepted == []


@in_loop
async def test_a_drop_ends_the_computing_of_what_is_wanted():
    class Wanting(LeastOpen):
        def wanted(self):
            return [prefix_of([number]) for number in range(5, 9)]

    async with fleet_of(1, patient=True, chooser=Wanting()) as fleet:
        await turns()
        new = FakeMember()
        fleet.backend.add("1", new)
        await turns()
        fleet.members.append(new)
        dropping = asyncio.ensure_future(fleet.backend.drop(None, None))
        while fleet.backend.members[1].state is MemberState.WARMING or not dropping.done():
            await fleet.step()
        assert len(new.accepted) == 1
        assert (await dropping)["erased"] is True


@in_loop
async def test_a_drop_is_waited_for_as_long_as_its_member_answers_other_questions(monkeypatch):
    class Erasing(FakeMember):
        asked = 0

        async def stats(self):
            self.asked += 1
            if self.asked == 3:
                self.erased.set()
            return {}

        async def drop(self, tenant, prefix):
            self.erased = asyncio.Event()
            await self.erased.wait()
            return {"dropped_tokens": {"disk": 640}, "left_tokens": 0, "erased": True}

    class Silent(Erasing):
        async def stats(self):
            await asyncio.Event().wait()

    monkeypatch.setattr("weft.fleet.questions.PROBE_SECONDS", 0.02)
    async with fleet_of(1, patient=True) as fleet:
        await turns()
        slow, silent = Erasing(), Silent()
        for member in (slow, silent):
            await member.start()
        fleet.backend.members[0].backend = slow
        assert (await fleet.backend.drop(None, None))["dropped_tokens"] == {"disk": 640}
        assert slow.asked == 3
        fleet.backend.members[0].backend = silent
        with pytest.raises(EngineStopped):
            await fleet.backend.drop(None, None)


def test_the_tenants_of_all_members_are_reported():
    reports = {
        "a": {"tenants": [{"digest": "01", "tokens": 64}]},
        "b": {"tenants": [{"digest": "02", "tokens": 640}, {"digest": "01", "tokens": 128}]},
    }
    expected = [{"digest": "02", "tokens": 640}, {"digest": "01", "tokens": 192}]
    assert merged_reports(reports, 5)["tenants"] == expected


def test_prefixes_that_were_hit_most_are_wanted_first_and_their_number_is_bounded():
    wanted = WantedPrefixes(limit=3)
    tokens = np.arange(4 * CELL, dtype=np.int32)
    for key, cells, hits in ((b"a", 1, 3), (b"b", 4, 1), (b"c", 2, 3), (b"d", 2, 1)):
        for _ in range(hits):
            wanted.note([key], tokens[: cells * CELL], key)
    assert len(wanted) == 3
    found = [prefix.request() for prefix in wanted.best(2)]
    assert [request.salt for request in found] == [b"c", b"b"], "the first one was forgotten"
    assert [len(request.prompt) for request in found] == [2 * CELL + 1, 4 * CELL + 1]
    assert all(request.params.max_tokens == 1 and request.priority > 1 << 20 for request in found)
    wanted.note([b"e"], np.zeros(1 << 20, np.int32), b"")
    assert len(wanted) == 3, "it is too long to remember"


@in_loop
async def test_routed_requests_without_a_common_prefix_are_spread_and_full_members_come_last():
    async with fleet_of(3, chooser=RoutedChoice()) as fleet:
        # Their first tokens have arrived, so no prompt waits anywhere.
        streams = [await fleet.submit([20], 90) for _ in range(6)]
        assert sorted(stream.member.name for stream in streams) == ["0", "0", "1", "1", "2", "2"]
    members = [FakeMember(msgspec.structs.replace(fake_info(exact=False), max_sequences=1)) for _ in range(2)]
    fleet = Fleet()
    fleet.members = members
    named = [(str(place), member) for place, member in enumerate(members)]
    fleet.backend = FleetBackend(named, chooser=RoutedChoice(), check_seconds=None)
    await fleet.backend.start()
    first = await fleet.submit(list(range(20, 90)), 50)
    second = await fleet.submit(list(range(20, 90)), 50)
    assert first.member is not second.member, "a seat is free there"
    await fleet.backend.stop(0)


@in_loop
async def test_random_deaths_leave_nothing_in_the_router():
    choice = RoutedChoice()
    await random_traffic(5, 150, choice=choice)
    assert choice.router.pending == 0
    assert not choice._ranked
