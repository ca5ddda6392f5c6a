"""Disaggregated prefill on the rolling-hash device: whatever the wire does, answers are those of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.support.hashed.bad_wire import THERE, AreaDevice, SendingEnd, Wire
from tests.support.hashed.disaggregated import make_pair
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.base.transfers import Destination, Granted, Offer, SendingEnded, StagedUnit, TransferEvent, UnitsSent
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory import dropping
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.sections import sections
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory
from weft.memory.tiers.exchange.departures import SHARE, Aloft, Departures, area_bytes
from weft.start.disaggregated import staging_bytes
from weft.transfer.connection import Memories
from weft.transfer.messages import Contract
from weft.transfer.tcp import TcpTransport


class QuietEnd(SendingEnd):
    """Grants everything at once, and then reports nothing any more."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.granted: list[TransferEvent] = []
        self.sent: list[StagedUnit] = []
        self.finished = False

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        self.granted = [Granted(transfer, 0, len(offer.keys), point=True)]

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        self.sent += units

    def finish(self, transfer: int) -> None:
        self.finished = True

    def poll(self) -> list[TransferEvent]:
        events, self.granted = self.granted, []
        return events


def test_a_prompt_is_sent_to_its_end_although_no_event_wakes_the_engine():
    pair = make_pair(1)
    workload, spec = pair.workload, pair.workload.spec
    config = replace(pair.prefill.config, departures_bytes=area_bytes(spec, 64), memory_bytes=1 << 20, max_length=64)
    end = QuietEnd(pair.wire)
    device = AreaDevice(workload, config, [config.departures_bytes], Random(0))
    engine = Engine(spec, device, config, transport=end)
    prompt = np.arange(3 * spec.cell, dtype=np.int32) % 90
    engine.add(Request(prompt, SamplingParams(max_tokens=0), send_to=THERE))
    while not engine.idle:
        engine.step()
    assert end.finished
    assert {unit.place for unit in end.sent if unit.kind == "page"} == {0, 1, 2}


class SlowEnd(QuietEnd):
    """Grants everything at once; the units of the first transfer are never sent, those of others at once."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.opened: list[int] = []
        self.complete: list[int] = []

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        self.opened.append(transfer)
        self.granted.append(Granted(transfer, 0, len(offer.keys), point=True))

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        if transfer != self.opened[0]:
            self.granted.append(UnitsSent(transfer, tuple(units)))

    def finish(self, transfer: int) -> None:
        self.complete.append(transfer)


def test_a_slow_receiver_stops_no_other_transfer():
    pair = make_pair(1)
    workload, spec = pair.workload, pair.workload.spec
    # Room for one prompt of many cells, if it could take all of it.
    config = replace(pair.prefill.config, departures_bytes=area_bytes(spec, 24), memory_bytes=1 << 20, max_length=128)
    end = SlowEnd(pair.wire)
    engine = Engine(spec, AreaDevice(workload, config, [config.departures_bytes], Random(0)), config, transport=end)
    for first in (0, 50):
        prompt = (np.arange(24 * spec.cell, dtype=np.int32) + first) % 90
        engine.add(Request(prompt, SamplingParams(max_tokens=0), send_to=THERE))
    for _ in range(400):
        engine.step()
    assert end.complete == end.opened[1:]


class AbandonedEnd(QuietEnd):
    """Notes which transfers are abandoned."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.abandoned: list[int] = []

    def abandon(self, transfer: int) -> None:
        self.abandoned.append(transfer)


@pytest.mark.parametrize("by", ["tenant", "prefix", "all"])
def test_a_drop_ends_the_transfers_of_what_is_dropped(by):
    pair = make_pair(1)
    workload, spec = pair.workload, pair.workload.spec
    config = replace(pair.prefill.config, departures_bytes=area_bytes(spec, 64), memory_bytes=1 << 20, max_length=64)
    end = AbandonedEnd(pair.wire)
    engine = Engine(spec, AreaDevice(workload, config, [config.departures_bytes], Random(0)), config, transport=end)
    prompt = np.arange(3 * spec.cell, dtype=np.int32) % 90
    one, two = (
        engine.add(Request(prompt, SamplingParams(max_tokens=0), salt=salt, send_to=THERE)) for salt in (b"1", b"2")
    )
    assert engine.ledger.departures is not None
    while len(engine.ledger.departures.active) < 2:
        engine.step()
    key = engine.ledger.departures.active[two].keys[1]
    tenant, prefix = {"tenant": (tenant_digest(b"2"), None), "prefix": (None, key), "all": (None, None)}[by]
    engine.begin_drop(0, tenant, prefix)
    assert end.abandoned == ([one, two] if by == "all" else [two])


def test_a_prompt_whose_prefix_is_being_dropped_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dropping, "LOOKS_PER_STEP", 1)
    pair = make_pair(1)
    workload, spec = pair.workload, pair.workload.spec
    config = replace(pair.prefill.config, departures_bytes=area_bytes(spec, 64), memory_bytes=1 << 20, max_length=64)
    end = AbandonedEnd(pair.wire)
    engine = Engine(spec, AreaDevice(workload, config, [config.departures_bytes], Random(0)), config, transport=end)
    prompt = np.arange(8 * spec.cell, dtype=np.int32) % 90
    engine.add(Request(prompt, SamplingParams(max_tokens=0), salt=b"1"))
    while not engine.idle:
        engine.step()
    assert len(engine.ledger.cache.trie) == 8
    engine.begin_drop(0, tenant_digest(b"1"))
    number = engine.add(Request(prompt, SamplingParams(max_tokens=0), salt=b"1", send_to=THERE))
    while not any(output.finish for output in engine.step() if output.sequence == number):
        pass
    assert engine.ledger.hidden, "the drop has ended before the request"
    assert not end.sent, "cells that the drop has not reached were sent"
    assert engine.report(number).cached_tokens == 0
    while not engine.take_dropped():
        engine.step()
    assert not len(engine.ledger.cache.trie)


def test_no_piece_overtakes_another_while_a_step_computes_its_layers():
    """Between two looks at a step, all of it may be computed."""
    layer = AttentionMemory(1, 8, "float32")
    spec = MemorySpec((layer, layer))
    sizes, size = unit_bytes(spec), area_bytes(spec, 16)
    departures = Departures(spec, Cache(spec, Arena(sizes, size), "lru"), Arena(sizes, size), 0)
    departures.sections = sections(spec, 1)
    page = departures.cache.take(Kind.PAGE)
    assert page is not None
    departures.begin(1, [b"k"], b"")
    departures.granted(1, 0, 1, point=False)
    departures.launched(1, Aloft("flight", 1, 0, (page,), None))
    looks = iter([False, True, True, True])
    plans = [plan for _ in range(4) if (plan := departures.plan(lambda flight, layer: next(looks))) is not None]
    half = sizes[Kind.PAGE] // 2
    assert [plan.piece for plan in plans] == [(0, half), (half, 2 * half)]


def test_an_event_before_the_engine_has_a_bell_rings_it():
    """Otherwise no later event would: a bell rings once until the next poll."""
    transport = TcpTransport(Contract(b"f" * 32, {}), b"s" * 32, Memories())
    engine = make_pair(1).prefill
    assert engine.exchange is not None
    engine.exchange.transport = transport
    transport.report(SendingEnded(1, None))
    rung: list[bool] = []
    engine.on_transfers(lambda: rung.append(True))
    transport.report(SendingEnded(2, None))
    assert rung


@pytest.mark.parametrize("state_bytes", [1 << 20, 100 << 20, 1 << 30])
def test_receivers_that_are_stuck_leave_room_for_others_however_large_states_are(state_bytes):
    state = RecurrentMemory((Part("state", (state_bytes // 4,), "float32"),), (Part("token", (1,), "float32"),), 1)
    spec = MemorySpec((AttentionMemory(32, 64, "float32"), state))
    sizes = {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL}
    arena = Arena(sizes, staging_bytes(spec, 2048))
    for _ in range(7):
        assert arena.take(Kind.STATE) is not None
    assert arena.take(Kind.PAGE) is not None
    assert arena.take(Kind.STATE) is not None
    assert sizes[Kind.STATE] <= SHARE * arena.slabs * arena.slab_bytes
