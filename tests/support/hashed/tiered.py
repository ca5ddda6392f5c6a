"""The rolling-hash device with host memory below it, and workloads that need it.

Copies are executed late and at random moments, as a copy stream would: whatever is read or written too early or too
late shows as a wrong hash. `patience` is the chance that a copy under way has landed when the engine asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from tests.support.hashed.rolling import POISON, RollingDevice
from tests.support.hashed.workloads import Run, Workload, check_answers, drive, random_workload, tight_memory
from weft.base.copies import CopyPlan, Direction
from weft.base.plan import Landing, Plan
from weft.engine.loop import Engine
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.memory.tiers.tiers import Tiers


@dataclass
class Ticket:
    plan: CopyPlan
    executed: bool = False


class TieredDevice(RollingDevice):
    def __init__(
        self, spec: MemorySpec, memory_bytes: int, seats: int, lazy: bool, host_bytes: int, random: Random
    ) -> None:
        super().__init__(spec, memory_bytes, seats, lazy)
        sizes = unit_bytes(spec)
        self.host = {
            kind: np.full((host_bytes // sizes[kind], self.memory[kind].shape[1]), POISON, np.uint64)
            for kind in sizes
            if kind is not Kind.TAIL
        }
        self.load_bytes_per_second: float | None = None
        self.random = random
        self.patience = random.choice([0.05, 0.5, 1.0])
        self.queues: dict[Direction, deque[Ticket]] = {each: deque() for each in Direction}
        self.copied_units = dict.fromkeys(Direction, 0)

    def copy(self, plan: CopyPlan) -> Ticket:
        ticket = Ticket(plan)
        if plan.after_steps:
            self.execute_all()
        self.queues[plan.direction].append(ticket)
        self.progress()
        return ticket

    def copied(self, ticket: Ticket, wait: bool) -> float | None:
        if not wait and self.random.random() > self.patience:
            self.progress()
            return None
        while not ticket.executed:
            self.execute_copy(ticket.plan.direction)
        return 1e-6

    def progress(self) -> None:
        """Copies run whenever they like, in the order of their direction."""
        for direction, queue in self.queues.items():
            if queue and self.random.random() < self.patience / 2:
                self.execute_copy(direction)

    def execute_copy(self, direction: Direction) -> None:
        ticket = self.queues[direction].popleft()
        for kind, upper, lower, count in ticket.plan.runs():
            device, host = self.memory[Kind(kind)], self.host[Kind(kind)]
            if direction is Direction.SAVE:
                host[lower : lower + count] = device[upper : upper + count]
            else:
                device[upper : upper + count] = host[lower : lower + count]
            self.copied_units[direction] += count
        ticket.executed = True

    def launch(self, plan: Plan) -> dict:
        self.progress()
        return super().launch(plan)

    def execute(self, plan: Plan) -> Landing:
        landing = super().execute(plan)
        self.progress()
        return landing


def tiered_workload(seed: int, count: int = 8) -> Workload:
    """A workload whose device memory is tight, with host memory from a few units to more than it needs."""
    workload, random = random_workload(seed, count, cache=True), Random(f"host {seed}")
    host = tight_memory(workload.spec, workload.arrivals, random.choice([1.0, 2.0, 5.0, 20.0]))
    memory = tight_memory(workload.spec, workload.arrivals, random.choice([1.0, 1.3, 2.0]))
    # Without the paranoid mode, loads do not wait for the steps in flight.
    changes = {"host_bytes": host, "memory_bytes": memory, "paranoid": random.random() < 0.7}
    return replace(workload, config=replace(workload.config, **changes))


def make_hasty(tiers: Tiers, random: Random) -> None:
    """Let loads be slow or seem to hang, so that requests choose among resume points and give up loads."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += random.choice([0.0, 0.0, 0.0, 4.0, 40.0])
        return now

    tiers.clock = clock
    for link in tiers.links:
        link.rates.prefill_tokens = 1.0
        link.rates.load_bytes = random.choice([None, 1e9, 1e3, 1e2])


def run_tiered(
    workload: Workload,
    seed: int,
    prepare: Callable[[Tiers, Random], None] | None = None,
    engine_class: type[Engine] = Engine,
) -> Run:
    config, random = workload.config, Random(f"copies {seed}")
    device = TieredDevice(
        workload.spec, config.memory_bytes, config.max_sequences, workload.lazy, config.host_bytes, random
    )
    engine = engine_class(workload.spec, device, config)
    assert engine.ledger.tiers is not None
    # A few units in each plan, so that loads take several.
    for copies in (engine.ledger.tiers.links[0].saves, engine.ledger.tiers.links[0].loads):
        copies.chunk_bytes = random.choice([1, 600, 1 << 20])
        copies.most_bytes = random.choice([1, 2000, 1 << 20])
    if prepare is not None:
        prepare(engine.ledger.tiers, random)
    run = Run(engine, device)
    drive(workload, run)
    engine.ledger.retentions.give_up()
    check_answers(workload, run)
    engine.ledger.tiers.clear()
    assert engine.ledger.tiers.links[0].lower.arena.used_slabs == 0, "host memory is still owned after it was cleared"
    return run
