"""The book of connections: bounds in all and per address, who gives way, what is logged and counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest

from weft.server.http.connections import LOG_SECONDS, Connections, Occasionally
from weft.server.metrics.connections import ConnectionCollector


@dataclass(eq=False)
class Guest:
    share: str | None = None
    cuts: list[str] = field(default_factory=list)

    def cut(self) -> None:
        self.cuts.append("cut")


def taken(connections: Connections, *guests: Guest) -> None:
    for guest in guests:
        assert connections.enter(guest) is None
        connections.waits(guest)


def test_the_one_that_waits_longest_gives_way_and_one_with_a_request_never_does():
    connections = Connections(bound=3, per_address=9)
    first, second, third = guests = [Guest() for _ in range(3)]
    taken(connections, *guests)
    connections.works(first)
    connections.waits(second)  # anew: a request has come and gone meanwhile
    taken(connections, Guest())
    assert [len(guest.cuts) for guest in guests] == [0, 0, 1]
    taken(connections, Guest())
    assert [len(guest.cuts) for guest in guests] == [0, 1, 1]
    assert len(connections) == 3
    assert third.cuts == ["cut"]


def test_a_connection_that_has_not_been_heard_yet_is_not_cut():
    connections = Connections(bound=1, per_address=9)
    fresh = Guest()
    assert connections.enter(fresh) is None
    refusal = connections.enter(Guest())
    assert refusal is not None
    assert refusal[0] == 503
    assert fresh.cuts == []


def test_an_address_at_its_bound_loses_its_own_waiting_connections_first():
    connections = Connections(bound=9, per_address=2)
    other, working, waiting = Guest("other"), Guest("one"), Guest("one")
    taken(connections, other, working, waiting)
    connections.works(working)
    last = Guest("one")
    taken(connections, last)
    assert (len(other.cuts), len(working.cuts), len(waiting.cuts)) == (0, 0, 1)
    connections.works(last)
    refusal = connections.enter(Guest("one"))
    assert refusal is not None
    assert refusal[0] == 429
    connections.leave(last)
    taken(connections, Guest("one"))


def test_refused_ones_are_few_and_count_for_no_address():
    connections = Connections(bound=1, per_address=1)
    working = Guest()
    taken(connections, working)
    connections.works(working)
    refused = [Guest(f"address {number}") for number in range(20)]
    assert all(connections.enter(guest) for guest in refused)
    assert [len(guest.cuts) for guest in refused] == [1] * 12 + [0] * 8
    connections.leave(working)
    taken(connections, Guest("address 19"))


def test_every_end_is_reported_but_a_cut_only_when_it_is_done():
    ends = []
    connections = Connections(bound=1, per_address=9)
    connections.left = lambda: ends.append("left")
    first = Guest()
    taken(connections, first, Guest())
    assert (first.cuts, ends) == (["cut"], [])
    connections.leave(first)
    assert ends == ["left"]


def test_a_flood_makes_few_lines_of_log(caplog):
    now = 0.0
    warnings = Occasionally(lambda: now)
    for _ in range(1000):
        warnings.warn("%d of them", 3)
    warnings.warn("something else")
    now = LOG_SECONDS
    warnings.warn("%d of them", 4)
    assert [record.getMessage() for record in caplog.records] == [
        "3 of them",
        "something else",
        "4 of them (999 more since the last such line)",
    ]


def test_connections_and_how_often_they_met_a_bound_are_metrics():
    connections = Connections(bound=2, per_address=9)
    taken(connections, *[Guest() for _ in range(5)])
    registry = CollectorRegistry()
    registry.register(ConnectionCollector(connections))
    page = generate_latest(registry).decode()
    assert "weft_connections 2.0" in page
    assert "weft_connections_limit 2.0" in page
    assert 'weft_connections_crowded_total{bound="total"} 3.0' in page
    assert 'weft_connections_crowded_total{bound="descriptors"} 0.0' in page
