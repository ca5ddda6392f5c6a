"""Ways to answer a request twice, to lose it or to end another one, planted from outside and caught by random traffic.

`docs/lab/planted-bugs.md` is the table of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.fences import ROOT
from tests.support.fleet import drops as drops_checks
from tests.support.fleet import fleets
from tests.support.servers.fake_members import random_traffic
from weft.fleet.backend import FleetBackend
from weft.fleet.member import Member
from weft.fleet.stream import FleetStream
from weft.fleet.warming import DropsHeard
from weft.memory.journal import Journal
from weft.wire import handshake

Patch = pytest.MonkeyPatch


PLANTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = []


def plant(check: Callable[[], None]) -> Callable[[Callable[[Patch], None]], None]:
    return lambda sow: PLANTS.append((sow, check))


def traffic() -> None:
    asyncio.run(random_traffic(1, 150))


def aborts() -> None:
    fleets.check_aborts_and_stops_reach_the_member_that_has_the_request()


def silence() -> None:
    fleets.check_a_silent_member_gives_up_what_it_has_not_begun()


def reflection() -> None:
    from tests.support.fleet import doors

    doors.check_a_mac_is_good_for_one_role_one_channel_and_one_handshake()


def drops() -> None:
    for seed in range(10):
        drops_checks.live(seed, loss=0.3)


@plant(traffic)
def a_request_is_sent_on_after_its_first_token(patch: Patch) -> None:
    patch.setattr(FleetStream, "may_move", property(lambda stream: True))


@plant(traffic)
def an_answer_arrives_from_two_members(patch: Patch) -> None:
    """A request that has begun is given up too, so that the next member answers it from the start."""
    patch.setattr(FleetStream, "begun", property(lambda stream: False))


@plant(aborts)
def an_abort_reaches_another_member(patch: Patch) -> None:
    original = FleetStream.ask_to_end

    def confused(stream: FleetStream, stopped: bool) -> None:
        others = [each for member in FLEETS[-1].members for each in member.streams if each is not stream]
        original(others[0] if others else stream, stopped)

    start = FleetBackend.start

    async def noted(fleet: FleetBackend) -> None:
        FLEETS.append(fleet)
        await start(fleet)

    patch.setattr(FleetBackend, "start", noted)
    patch.setattr(FleetStream, "ask_to_end", confused)


FLEETS: list[FleetBackend] = []


@plant(silence)
def a_silent_member_keeps_what_waits_for_it(patch: Patch) -> None:
    patch.setattr(Member, "give_up", lambda member: None)


@plant(traffic)
def an_aborted_request_is_sent_on(patch: Patch) -> None:
    """The member dies; its request, which its caller has left, is started again and never ended."""
    patch.setattr(FleetStream, "close", lambda stream: stream.leave())


@plant(reflection)
def a_proof_can_be_sent_back(patch: Patch) -> None:
    digest = handshake.hmac.digest

    def roleless(secret: bytes, message: bytes, kind: str) -> bytes:
        return digest(secret, message[64:], kind)

    patch.setattr(handshake.hmac, "digest", roleless)


@plant(drops)
def a_drop_is_reported_to_no_router(patch: Patch) -> None:
    patch.setattr(Journal, "note_drop", lambda journal, tenant, prefix: None)


@plant(drops)
def a_lost_report_of_a_drop_is_ignored(patch: Patch) -> None:
    patch.setattr(DropsHeard, "new", lambda heard, changes: changes.dropped)


@pytest.mark.parametrize(("sow", "check"), PLANTS, ids=[sow.__name__ for sow, _ in PLANTS])
def test_a_planted_bug_of_members_is_caught(sow, check, monkeypatch):
    check()
    # What a bug leaves hanging must not hang the test.
    monkeypatch.setattr("tests.support.servers.backends.SECONDS", 1)
    sow(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        check()


def test_every_plant_stands_in_the_table() -> None:
    table = (ROOT / "docs" / "lab" / "planted-bugs.md").read_text()
    assert [sow.__name__ for sow, _ in PLANTS if f"`{sow.__name__}`" not in table] == []
