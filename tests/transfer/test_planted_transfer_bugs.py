"""Bugs of transfers between engines, planted from outside and caught by random workloads on a bad wire.

`docs/lab/planted-bugs.md` has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.hashed import bad_wire
from tests.support.hashed import disaggregated as tests_disaggregated
from tests.support.hashed.disaggregated import run_pair
from tests.support.tiers.planted_keys import plant_identity
from weft.base.copies import UnitPiece
from weft.engine import exchange
from weft.memory.tiers.exchange import sent_units
from weft.memory.tiers.exchange.arrivals import ArrivalsLink
from weft.memory.tiers.exchange.departures import Departures

SEEDS = 200
Patch = pytest.MonkeyPatch
Sow = Callable[[Patch], None]
PLANTS: list[Sow] = []
# Workloads that notice at once, to save time. If they no longer do, others will.
SOONEST = {"a_point_is_published_before_its_pages": 72, "a_cell_without_a_page_is_loaded": 70}


def plant(sow: Sow) -> Sow:
    PLANTS.append(sow)
    return sow


@plant
def a_unit_is_stored_under_the_cell_of_another_key(patch: Patch) -> None:
    original = ArrivalsLink.received

    def received(self, transfer, place):
        pages = self.incoming[transfer].pages
        if len(pages) > 1:
            first, *_, last = pages
            pages[first], pages[last] = pages[last], pages[first]
        original(self, transfer, place)

    patch.setattr(ArrivalsLink, "received", received)


@plant
def a_point_is_published_before_its_pages(patch: Patch) -> None:
    original = ArrivalsLink.received

    def received(self, transfer, place):
        incoming = self.incoming[transfer]
        if place >= incoming.end:
            incoming.received.update(range(incoming.end))
        original(self, transfer, place)

    patch.setattr(ArrivalsLink, "received", received)


@plant
def a_prefix_is_offered_without_its_salt(patch: Patch) -> None:
    plant_identity(patch, lambda identity: replace(identity, salt=b""))


@plant
def a_prefix_is_noted_for_another_tenant(patch: Patch) -> None:
    offer = exchange.Offer
    patch.setattr(exchange, "Offer", lambda keys, tenant: offer(keys, bytes(16)))


@plant
def staging_memory_is_used_again_before_it_was_sent(patch: Patch) -> None:
    landed, sent = Departures.landed, Departures.sent

    def early(self):
        found = landed(self)
        if found is not None:
            sent(self, found[0], tuple(found[1]))
        return found

    patch.setattr(Departures, "landed", early)
    patch.setattr(Departures, "sent", lambda self, number, units: None)


@plant
def a_reserved_unit_is_freed_while_the_wire_may_write_it(patch: Patch) -> None:
    def drop_incoming(self):
        for transfer in list(self.incoming):
            self.ended(transfer)

    patch.setattr(ArrivalsLink, "drop_incoming", drop_incoming)


@plant
def a_cell_without_a_page_is_loaded(patch: Patch) -> None:
    def reaches(self, keys, first):
        node = self.lower.trie.deepest(keys)
        return max(first, 0 if node is None else node.depth)

    patch.setattr(ArrivalsLink, "reaches", reaches)


@plant
def a_damaged_unit_is_believed(patch: Patch) -> None:
    patch.setattr(sent_units, "checksum", lambda data: 0)
    patch.setattr(bad_wire, "checksum", lambda data: 0)


@plant
def a_staged_unit_is_released_before_its_read_has_ended(patch: Patch) -> None:
    announce = bad_wire.PullingWire.read

    def read(self, travel):
        unit = travel.staged[0]
        announce(self, travel)
        self.send_events.append(bad_wire.UnitsSent(travel.number, (unit,)))

    patch.setattr(bad_wire.PullingWire, "read", read)
    patch.setattr(bad_wire.PullingWire, "accepted", lambda self, travel, header, start: None)


@plant
def a_pulled_transfer_ends_before_its_reads(patch: Patch) -> None:
    abandon = bad_wire.SendingEnd.abandon

    def at_once(self, transfer):
        abandon(self, transfer)
        if transfer in self.wire.travels:
            self.wire.send_events.append(bad_wire.SendingEnded(transfer, "abandoned"))

    patch.setattr(bad_wire.SendingEnd, "abandon", at_once)


@plant
def a_piece_leaves_before_its_layer_is_computed(patch: Patch) -> None:
    original = tests_disaggregated.sections

    def sections(spec, least_bytes):
        return tuple(replace(each, layer=max(0, each.layer - 1)) for each in original(spec, least_bytes))

    patch.setattr(tests_disaggregated, "sections", sections)


@plant
def a_copy_does_not_wait_for_the_step_in_flight(patch: Patch) -> None:
    plan = Departures.plan
    patch.setattr(Departures, "plan", lambda self, has_computed: plan(self, lambda flight, layer: True))


@plant
def the_piece_of_one_layer_travels_as_that_of_another(patch: Patch) -> None:
    original = Departures.queue

    def queue(self, departure, found, piece, after):
        original(self, departure, found, piece, after)
        if piece is not None and piece.start:
            self.queued[-1].plan = replace(self.queued[-1].plan, piece=UnitPiece(0, piece.end - piece.start))

    patch.setattr(Departures, "queue", queue)


@plant
def a_unit_counts_with_its_first_piece(patch: Patch) -> None:
    def fill(self, header):
        place = self.places[header.unit]
        place.filled += header.size
        return place.filled == header.size

    patch.setattr(sent_units.GrantedPlaces, "fill", fill)


@plant
def a_copy_of_a_step_in_flight_owns_nothing(patch: Patch) -> None:
    original = Departures.cut

    def cut(self, departure, found, aloft):
        original(self, departure, found, aloft)
        for copy, _ in found if aloft is not None else ():
            self.release_source(copy)

    patch.setattr(Departures, "cut", cut)


# Bugs of transfers whose units are pulled.
PULLED = {"a_staged_unit_is_released_before_its_read_has_ended", "a_pulled_transfer_ends_before_its_reads"}


@pytest.mark.parametrize("sow", PLANTS, ids=lambda sow: sow.__name__)
def test_a_planted_transfer_bug_is_caught(sow: Sow, monkeypatch: pytest.MonkeyPatch) -> None:
    sow(monkeypatch)
    for seed in (SOONEST.get(sow.__name__, 0), *range(SEEDS)):
        try:
            run_pair(seed, pulled=sow.__name__ in PULLED)
        except (AssertionError, KeyError, IndexError, ValueError):
            return
    pytest.fail(f"{SEEDS} workloads did not notice")
