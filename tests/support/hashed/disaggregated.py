"""Two engines on the rolling-hash device, a prefill and a decode engine, with a bad wire between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from tests.support.hashed.bad_wire import (
    THERE,
    AreaDevice,
    Faults,
    PullingWire,
    ReceivingEnd,
    RoundingAreaDevice,
    SendingEnd,
    Wire,
    with_layers,
)
from tests.support.hashed.workloads import Arrival, Workload, random_workload, request_of, tight_memory
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.base.transfers import (
    Offer,
)
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.keys import PrefixIdentity
from weft.memory.sections import sections
from weft.memory.tiers.exchange.departures import area_bytes


@dataclass
class Pair:
    """A prefill and a decode engine, and how requests fared."""

    workload: Workload
    wire: Wire
    prefill: Engine
    decode: Engine
    random: Random
    evicting: float  # chance in each step that a device evicts all it can
    answers: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)


def random_faults(random: Random) -> Faults:
    if random.random() < 0.3:
        return Faults()
    return Faults(
        lost=random.choice([0.0, 0.1]),
        repeated=random.choice([0.0, 0.2]),
        damaged=random.choice([0.0, 0.1]),
        cut=random.choice([0.0, 0.02]),
        reordered=random.random() < 0.5,
    )


def make_pair(seed: int, count: int = 8, exact: bool = False, pulled: bool = False) -> Pair:
    workload, random = random_workload(seed, count, cache=True, exact=exact), Random(f"apart {seed}")
    workload = replace(workload, spec=with_layers(workload.spec))
    spec, longest = workload.spec, max(len(each.prompt) for each in workload.arrivals)
    cells = longest // spec.cell + 1
    arrivals = int(area_bytes(spec, cells) * random.choice([2.0, 2.1, 2.5, 20]))
    departures = int(area_bytes(spec, 1) * random.choice([1, 1, 2, 10]))
    memory = [tight_memory(spec, workload.arrivals, random.choice([1.0, 1.3, 2.0, 6.0])) for _ in range(2)]
    host = random.choice([0, 0, tight_memory(spec, workload.arrivals, 2.0)])
    paranoid = random.random() < 0.7
    decoding = replace(
        workload.config, memory_bytes=memory[0], arrivals_bytes=arrivals, host_bytes=host, paranoid=paranoid
    )
    prefilling = replace(
        workload.config,
        memory_bytes=memory[1],
        departures_bytes=departures,
        max_tokens_per_step=max(workload.config.max_sequences, random.choice([1, 4, 8, 64])),
        depth=random.randint(0, 1),
        paranoid=paranoid,
    )
    wire = (PullingWire if pulled else Wire)(spec, random, random_faults(random))
    wire.allowed = {offer_of(each, workload) for each in workload.arrivals}
    kind = RoundingAreaDevice if exact else AreaDevice
    source = kind(workload, prefilling, [departures], random)
    target = kind(workload, decoding, [*([host] if host else []), arrivals], random)
    wire.source, wire.target = source.areas[-1], target.areas[-1]
    prefill = Engine(spec, source, prefilling, transport=SendingEnd(wire))
    decode = Engine(spec, target, decoding, transport=ReceivingEnd(wire))
    assert prefill.ledger.departures is not None
    # Units travel whole, or layer by layer.
    prefill.ledger.departures.sections = sections(spec, random.choice([1, 1, 1 << 20]))
    wire.source_owners = prefill.ledger.departures.arena.owners
    assert decode.ledger.tiers is not None
    assert decode.ledger.tiers.arrivals is not None
    wire.owners = decode.ledger.tiers.arrivals.lower.arena.owners
    # A few units in each plan and each grant.
    decode.ledger.tiers.arrivals.window_bytes = random.choice([1, 2000, 1 << 20])
    for link in decode.ledger.tiers.links:
        link.loads.chunk_bytes, link.loads.most_bytes = random.choice([1, 600, 1 << 20]), random.choice([1, 1 << 20])
    decode.journal.restart()
    return Pair(workload, wire, prefill, decode, random, random.choice([0.02, 0.3]))


def offer_of(arrival: Arrival, workload: Workload) -> Offer:
    """The only offer that a request allows, computed from its tokens and its salt alone."""
    cell, config = workload.spec.cell, workload.config
    end = (len(arrival.prompt) - 1) // cell * cell
    identity = PrefixIdentity(cell, arrival.salt, config.form if config.exact else None)
    return Offer(tuple(identity.keys(np.array(arrival.prompt[:end], np.int32))), tenant_digest(arrival.salt))


def prefix_request(arrival: Arrival, cell: int) -> Request | None:
    """What the router sends to the prefill engine: the prompt up to the last position that a request can resume at."""
    end = (len(arrival.prompt) - 1) // cell * cell
    if not end:
        return None
    return Request(
        np.array(arrival.prompt[:end], np.int32),
        SamplingParams(max_tokens=0, temperature=0.0),
        salt=arrival.salt,
        priority=arrival.priority,
        send_to=THERE,
    )


@dataclass
class Journey:
    """A request from its arrival on: `prefilling` and `decoding` are its numbers at the engines."""

    index: int
    arrival: Arrival
    prefilling: int | None = None
    decoding: int | None = None
    patience: int = 0  # steps after which it goes to the decode engine, prefilled or not
    gives_up: int | None = None  # steps after which the prefill request is aborted
    began: int = 0


def drive_pair(pair: Pair, max_steps: int = 8000) -> None:
    """Send every request to the prefill engine first, or not, then to the decode engine; abort on the way."""
    waiting = sorted(enumerate(pair.workload.arrivals), key=lambda each: each[1].step)
    journeys: list[Journey] = []
    steps = 0
    while waiting or journeys or not (pair.prefill.idle and pair.decode.idle) or pair.wire.busy:
        while waiting and waiting[0][1].step <= steps:
            journeys.append(set_out(pair, *waiting.pop(0), steps))
        for journey in journeys:
            advance(pair, journey, steps)
        for output in pair.prefill.step():
            for journey in journeys:
                if journey.prefilling == output.sequence and output.finish is not None:
                    journey.prefilling = None
                    pair.prefill.forget(output.sequence)
        for output in pair.decode.step():
            take_output(pair, journeys, output)
        disturb(pair)
        journeys = [each for each in journeys if each.index not in pair.finished or each.prefilling is not None]
        steps += 1
        assert steps < max_steps, "the engines do not come to an end"


def disturb(pair: Pair) -> None:
    """Drop, flush or evict something, now and then."""
    random = pair.random
    if random.random() < 0.01:
        pair.decode.begin_drop(0, prefix=random.randbytes(1))
    pair.decode.take_dropped()
    if random.random() < 0.005:
        random.choice([pair.prefill, pair.decode]).flush()
    if random.random() < pair.evicting:
        # Only from the device: what it had may be missing when a prefix is claimed.
        random.choice([pair.prefill, pair.decode]).ledger.cache.clear()


def set_out(pair: Pair, index: int, arrival: Arrival, steps: int) -> Journey:
    random, journey = pair.random, Journey(index, arrival, began=steps)
    pair.answers[index] = []
    request = prefix_request(arrival, pair.workload.spec.cell)
    if request is not None and random.random() < 0.85:
        journey.prefilling = pair.prefill.add(request)
    journey.patience = random.choice([0, 5, 2000, 2000])
    journey.gives_up = random.randint(0, 30) if random.random() < 0.15 else None
    return journey


def advance(pair: Pair, journey: Journey, steps: int) -> None:
    since, arrival = steps - journey.began, journey.arrival
    if journey.prefilling is not None and since == journey.gives_up:
        pair.prefill.abort(journey.prefilling)
    if journey.decoding is None and (journey.prefilling is None or since >= journey.patience):
        journey.decoding = pair.decode.add(request_of(arrival))
        journey.began = steps
    elif journey.decoding is not None and arrival.abort_after is not None and since == arrival.abort_after:
        pair.decode.abort(journey.decoding)


def take_output(pair: Pair, journeys: list[Journey], output) -> None:
    journey = next(each for each in journeys if each.decoding == output.sequence)
    assert journey.index not in pair.finished, "an output after the end"
    if output.token is not None:
        pair.answers[journey.index].append(output.token)
    if output.finish is not None:
        pair.finished[journey.index] = output.finish


def check_pair(pair: Pair) -> None:
    """Every answer is that of an engine without any cache, and both engines own nothing that they do not use."""
    for index, arrival in enumerate(pair.workload.arrivals):
        expected = arrival.answer(pair.workload.spec, pair.workload.config.exact)
        answer, finish = pair.answers[index], pair.finished[index]
        assert finish is not FinishReason.ERROR
        if finish is FinishReason.ABORT:
            assert answer == expected[: len(answer)], f"request {index} went astray before it was aborted"
        else:
            assert answer == expected, f"request {index} answered {answer}, not {expected}"
    for engine in (pair.prefill, pair.decode):
        assert not engine.ledger.leases
        engine.flush()
        assert engine.ledger.arena.used_slabs == 0, "something is still owned after everything was forgotten"
    departures, tiers = pair.prefill.ledger.departures, pair.decode.ledger.tiers
    assert departures is not None
    assert tiers is not None
    assert not departures.active
    assert departures.arena.used_slabs == 0, "a staged unit was not given back"
    assert all(link.lower.arena.used_slabs == 0 for link in tiers.links), "a unit below the device is still owned"
    assert tiers.arrivals is not None
    assert not tiers.arrivals.incoming


def run_pair(seed: int, count: int = 8, exact: bool = False, pulled: bool = False) -> Pair:
    pair = make_pair(seed, count, exact, pulled)
    drive_pair(pair)
    check_pair(pair)
    return pair
