"""Engines whose caches are mirrored by a router, over a channel that may lose, repeat and reorder batches."""

from __future__ import annotations

from random import Random

import numpy as np

from tests.support.hashed.tiered import TieredDevice
from tests.support.hashed.workloads import Arrival, Run, Workload, drive
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.fleet.router import FleetRouter
from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import Key, PrefixIdentity
from weft.memory.ledger import Ledger


def truth(ledger: Ledger) -> dict[Key, set[Tier]]:
    """What a ledger holds, read from its tries without any event."""
    found: dict[Key, set[Tier]] = {}
    tiers = [(Tier.DEVICE, ledger.cache)]
    if ledger.tiers is not None:
        tiers += [(Tier[link.name.upper()], link.lower) for link in ledger.tiers.links]
    for tier, cache in tiers:
        for key, node in cache.trie.nodes.items():
            if node.resume is not None or not cache.point_bytes:
                found.setdefault(key, set()).add(tier)
            if tier is Tier.DEVICE and cache.point_bytes:
                found.setdefault(key, set()).add(Tier.PAGE)
    return found


def keys_of(arrival: Arrival, cell: int) -> list[Key]:
    return PrefixIdentity(cell, arrival.salt).keys(np.array(arrival.prompt, np.int32))


def keys_sent(workload: Workload) -> set[Key]:
    """The keys of everything that was sent or answered, each under the salt of its own request."""
    found: set[Key] = set()
    for arrival in workload.arrivals:
        tokens = np.array(arrival.prompt + arrival.answer(workload.spec), np.int32)
        found.update(PrefixIdentity(workload.spec.cell, arrival.salt).keys(tokens))
    return found


class MirroredEngine(Engine):
    """After every step its router takes the journal's batches. `loss` is the chance of a fault for each of them."""

    loss = 0.0
    check = True

    def attach(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self.random = Random(f"mirror {seed}")
        self.router = FleetRouter(workload.spec.cell)
        self.router.add("a")
        self.flushes = self.random.random() < 0.3
        self.most = self.random.choice([1, 3, 1 << 12])
        self.delayed: list[CacheChanges] = []
        self.restarts = 0
        self.journal.restart()

    def step(self) -> list:
        if self.flushes and self.random.random() < 0.1:
            self.flush()
        outputs = super().step()
        self.deliver()
        if self.check and not self.loss:
            self.compare()
        return outputs

    def deliver(self) -> None:
        while (batch := self.journal.take(self.most)) is not None:
            fault = self.random.choice(["lost", "repeated", "late"]) if self.random.random() < self.loss else ""
            if fault == "late":
                self.delayed.append(batch)
                continue
            arriving = {"lost": [], "repeated": [batch, batch]}.get(fault, [batch])
            for each in arriving + self.delayed:
                if not self.router.apply("a", each):
                    self.restarts += 1
                    self.journal.restart()
            self.delayed = []

    def mirrored(self) -> dict[Key, set[Tier]]:
        return self.router.index.held(self.router.replicas["a"].mirror)

    def compare(self) -> None:
        """The mirror is the ledger, and the router promises exactly what a lookup would find."""
        assert self.mirrored() == truth(self.ledger)
        for arrival in self.workload.arrivals:
            keys, limit = keys_of(arrival, self.ledger.cell), len(arrival.prompt) - 1
            found = self.ledger.match(keys, limit).cached
            if self.ledger.tiers is not None:
                lower = [link.lower.match(keys, limit).cached for link in self.ledger.tiers.links]
                found = max(found, *lower)
            assert self.router.choose(keys, len(arrival.prompt))[0].saved == found


def run_mirrored(workload: Workload, seed: int, loss: float = 0.0) -> MirroredEngine:
    config = workload.config
    device = TieredDevice(
        workload.spec, config.memory_bytes, config.max_sequences, workload.lazy, config.host_bytes, Random(seed)
    )
    engine = MirroredEngine(workload.spec, device, config)
    engine.attach(workload, seed)
    engine.loss = loss
    drive(workload, Run(engine, device))
    engine.loss = 0.0
    if loss:
        # A gap shows with the next change. These tokens occur in no workload's prompts in this order.
        engine.check = False
        tokens = np.arange(config.max_length - 1, dtype=np.int32)[::-1] % 90
        engine.add(Request(tokens.copy(), SamplingParams(max_tokens=1)))
        while not engine.idle:
            engine.step()
        assert engine.mirrored() == truth(engine.ledger)
    else:
        assert set(engine.mirrored()) <= keys_sent(workload), "a key under another salt"
    return engine
