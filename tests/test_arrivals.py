"""Prefixes that arrive: whose they are, and which offers are refused."""

from __future__ import annotations

from tests.apart import make_pair
from weft.base.transfers import Offer
from weft.engine.loop import Engine
from weft.memory import tenancy
from weft.memory.kinds import Kind
from weft.memory.tiers.arrivals import ArrivalsLink

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
    """Note so many other tenants that those of uncached prefixes are forgotten."""
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
    assert engine.ledger.drop(TENANT, None)["dropped_tokens"]["arrivals"] == engine.ledger.spec.cell


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
    assert ledger.drop(TENANT, None)["dropped_tokens"]["host"] == ledger.spec.cell
