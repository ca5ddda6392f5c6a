"""Prefixes that arrive: whose they are, and which offers are refused."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tests.support.hashed.bad_wire import ReceivingEnd
from tests.support.hashed.disaggregated import make_pair, offer_of
from tests.support.hashed.drops import drop
from tests.support.hashed.workloads import request_of
from weft.base.transfers import Offer, Offered, ReceivingEnded, ReservedUnit, TransferEvent, UnitReceived
from weft.engine.loop import Engine
from weft.memory import tenancy
from weft.memory.kinds import Kind
from weft.memory.tiers.exchange import arrivals as arrivals_module
from weft.memory.tiers.exchange.arrivals import ArrivalsLink

TENANT = b"t" * 16


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def decode_engine(host: bool = False) -> Engine:
    """A decode engine of a model with pages, and with or without host memory above them."""
    for seed in range(100):
        engine = make_pair(seed).decode
        if Kind.PAGE in engine.ledger.arena.unit_bytes and bool(engine.config.host_bytes) == host:
            return engine
    raise AssertionError("no workload of this kind")


def arrivals_of(engine: Engine) -> ArrivalsLink:
    assert engine.ledger.tiers is not None
    assert engine.ledger.tiers.arrivals is not None
    return engine.ledger.tiers.arrivals


def note_many(engine: Engine) -> None:
    """Note other tenants until those of uncached prefixes are forgotten."""
    for number in range(1 << 20, (1 << 20) + tenancy.LEAST_NOTED + 1):
        engine.ledger.tenancy.note(key(number), lambda: b"x" * 16)


def test_the_tenant_of_a_prefix_is_known_when_its_first_cell_arrives_late():
    engine = decode_engine()
    arrivals = arrivals_of(engine)
    assert arrivals.open(1, Offer((key(1),), TENANT), known=0) is None
    note_many(engine)
    found = arrivals.reserve(1)
    assert found is not None
    for unit in found.units:
        arrivals.received(1, unit.place)
    arrivals.ended(1)
    assert key(1) in arrivals.lower.trie.nodes
    assert drop(engine, tenant=TENANT)["dropped_tokens"]["arrivals"] == engine.ledger.spec.cell


def test_the_tenant_of_a_prefix_is_known_when_it_leaves_the_device_while_it_is_saved():
    engine = decode_engine(host=True)
    ledger, tiers = engine.ledger, engine.ledger.tiers
    assert tiers is not None
    page = ledger.cache.take(Kind.PAGE)
    ledger.tenancy.note(key(1), lambda: TENANT)
    node = ledger.cache.publish(key(1), None, page)
    tiers.links[0].saves.begin(node, None, lambda: None)
    plan = tiers.links[0].plan_begun()
    assert plan is not None
    ledger.cache.drop_end(node, 1)
    assert not ledger.cache.trie.nodes
    note_many(engine)
    tiers.landed(plan, 0.0)
    assert drop(engine, tenant=TENANT)["dropped_tokens"]["host"] == ledger.spec.cell


def test_many_prompts_that_are_not_computed_yet_find_room(monkeypatch: pytest.MonkeyPatch):
    """Each is offered when it enters the queue of a prefill engine, and takes a share of what the others leave."""
    link = arrivals_of(decode_engine())
    arena, page_bytes = link.lower.arena, link.lower.valuation.page_bytes
    size = arena.slabs * arena.slab_bytes
    monkeypatch.setattr(arrivals_module, "WINDOW_BYTES", 1)
    link.window_bytes = size // 4
    cells = (size // 2 - link.lower.point_bytes) // page_bytes
    granted = []
    for number in range(8):
        keys = tuple(key(1 + number * cells + cell) for cell in range(cells))
        assert link.open(number, Offer(keys, TENANT), known=0) is None
        found = link.reserve(number)
        assert found is not None
        granted.append(len(found.units))
    assert granted[0] * page_bytes > size // 4 - page_bytes
    assert granted == sorted(granted, reverse=True)


class LyingPeer(ReceivingEnd):
    """Offers what it likes; every granted unit arrives, with any bytes."""

    def __init__(self) -> None:
        self.events: list[TransferEvent] = []
        self.granted: dict[int, list[ReservedUnit]] = {}
        self.refused: dict[int, str] = {}
        self.confirmed: set[int] = set()

    def offer(self, number: int, keys: Sequence[bytes]) -> None:
        self.granted[number] = []
        self.events.append(Offered(number, Offer(tuple(keys), TENANT)))

    def send_one(self, number: int) -> None:
        if number in self.refused or number in self.confirmed:
            del self.granted[number]
            self.events.append(ReceivingEnded(number))
        elif self.granted[number]:
            self.events.append(UnitReceived(number, self.granted[number].pop(0).place))

    def grant(self, transfer: int, first: int, end: int, point: bool, units: Sequence[ReservedUnit]) -> None:
        self.granted[transfer] += units

    def confirm(self, transfer: int) -> None:
        self.confirmed.add(transfer)

    def refuse(self, transfer: int, reason: str) -> None:
        self.refused[transfer] = reason

    def poll(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events

    def wait(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize("keys", [[1, 2, 1], [2], [2, 1], [3, 2], [1, 3, 2]])
def test_an_offer_whose_keys_are_no_prefix_is_refused(keys):
    engine = decode_engine()
    cache, peer = engine.ledger.cache, LyingPeer()
    assert engine.exchange is not None
    engine.exchange.transport = peer
    above = cache.publish(key(1), None, cache.take(Kind.PAGE))
    cache.publish(key(2), above, cache.take(Kind.PAGE))
    peer.offer(1, [key(number) for number in keys])
    engine.step()
    assert "not those of one prefix" in peer.refused[1]


def test_an_offer_of_what_is_being_dropped_is_refused():
    engine, peer = decode_engine(), LyingPeer()
    assert engine.exchange is not None
    engine.exchange.transport = peer
    engine.begin_drop(1, tenant=TENANT)
    peer.offer(1, [key(1)])
    engine.take_transfers()
    assert "being dropped" in peer.refused[1]
    while not engine.take_dropped():
        engine.step()
    peer.offer(2, [key(1)])
    engine.take_transfers()
    assert 2 not in peer.refused


def test_no_offer_of_a_peer_that_lies_ends_the_engine():
    for seed in range(12):
        pair, random, peer = make_pair(seed), Random(seed), LyingPeer()
        assert pair.decode.exchange is not None
        pair.decode.exchange.transport = peer
        paths = [list(offer_of(each, pair.workload).keys) for each in pair.workload.arrivals]
        known = [each for path in paths for each in path]
        for number in range(60):
            kind = random.randrange(4)
            chosen = random.choice(paths)
            made = [chosen, chosen[::-1], chosen + random.choice(paths), random.choices(known, k=4) if known else []]
            if made[kind]:
                peer.offer(number, made[kind])
            if random.random() < 0.2:
                pair.decode.add(request_of(random.choice(pair.workload.arrivals)))
            for other in list(peer.granted):
                peer.send_one(other)
            pair.decode.step()
