"""What to simulate, as a value, and running it; if memory is a share of the working set, that is measured first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from weft.base.config import EngineConfig
from weft.memory.captures import ALL_CAPTURES, CaptureReasons
from weft.simulate.costs import CostModel
from weft.simulate.found import Found
from weft.simulate.oracle import Survey, survey
from weft.simulate.sessions import SimulatedSession
from weft.simulate.simulation import Simulation
from weft.simulate.stepping import Simulated
from weft.simulate.traces import read_trace
from weft.simulate.workloads import WORKLOADS, Draw

# Weights of work against recency that the bootstrap of the published policy tries, on this share of the sessions.
ALPHAS = (0.0, 0.5, 2.0)
BOOTSTRAP_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload by name, or a trace by its file: then `requests` lines of it (0: all) after the first `skip`."""

    name: str
    requests: int
    seed: int = 0
    rate: float | None = None
    trace: str | None = None
    speed: float = 1.0
    skip: int = 0

    def sessions(self, cell: int) -> Iterator[SimulatedSession]:
        if self.trace is not None:
            return read_trace(self.trace, cell, self.speed, self.requests or None, self.skip)
        return WORKLOADS[self.name](Draw(self.requests, cell, self.seed, self.rate))


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """Everything that one run depends on. `memory`, `host_memory` and `disk` are in bytes, or shares of the working
    set if they are fractions; the replicas share them."""

    traffic: Traffic
    cost: CostModel
    memory: int | float
    eviction: str = "value"
    captures: CaptureReasons = ALL_CAPTURES
    capture_every: int = 0
    max_sequences: int = 64
    max_tokens_per_step: int = 8192
    max_length: int = 200_000
    stride: int = 64
    oracle: bool = False
    alpha: float | None = None
    cache: bool = True
    replicas: int = 1
    router: str = "state"
    host_memory: int | float = 0
    disk: int | float = 0
    surveyed: Survey | None = field(default=None, compare=False)

    def in_bytes(self) -> SimulationSetup:
        """Return the same setup with all sizes in bytes."""
        sizes = {name: getattr(self, name) for name in ("memory", "host_memory", "disk")}
        if all(isinstance(size, int) for size in sizes.values()):
            return self
        known = self.surveyed or survey(self.traffic.sessions(self.cost.spec.cell), self.cost.spec.cell)
        whole = known.working_set_bytes(self.cost.spec)
        changes: dict[str, Any] = {n: s if isinstance(s, int) else int(s * whole) for n, s in sizes.items()}
        return replace(self, **changes)


def run(setup: SimulationSetup, tell: Callable[[Simulated], None] | None = None) -> Found:
    setup = setup.in_bytes()
    alpha = setup.alpha
    if setup.eviction == "flops" and alpha is None:
        alpha = bootstrap_alpha(setup)
    return simulation(setup, int(setup.memory), alpha or 0.0, tell).run()


def simulation(
    setup: SimulationSetup,
    memory_bytes: int,
    alpha: float,
    tell: Callable[[Simulated], None] | None = None,
    sessions: Iterator[SimulatedSession] | None = None,
) -> Simulation:
    config = EngineConfig(
        memory_bytes=memory_bytes,
        max_sequences=setup.max_sequences,
        max_tokens_per_step=max(setup.max_tokens_per_step, setup.max_sequences),
        max_length=setup.max_length,
        cache=setup.cache,
        eviction=setup.eviction,
        capture_every=setup.capture_every,
        host_bytes=int(setup.host_memory),
        disk_bytes=int(setup.disk),
    )
    return Simulation(
        setup.cost,
        config,
        sessions or setup.traffic.sessions(setup.cost.spec.cell),
        setup.stride,
        setup.oracle,
        tell,
        setup.captures,
        alpha,
        setup.replicas,
        setup.router,
    )


def bootstrap_alpha(setup: SimulationSetup) -> float:
    """Return the weight that would have served the first part of the traffic best, like Marconi's bootstrap."""
    assert isinstance(setup.memory, int)
    total = sum(1 for _ in setup.traffic.sessions(setup.cost.spec.cell))
    first = max(1, int(BOOTSTRAP_SHARE * total))

    def hits(alpha: float) -> int:
        sessions = islice(setup.traffic.sessions(setup.cost.spec.cell), first)
        return simulation(replace(setup, oracle=False), int(setup.memory), alpha, sessions=sessions).run().hit_tokens

    return max(ALPHAS, key=hits)
