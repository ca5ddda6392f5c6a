"""One run: requests arrive and are routed, engines compute them on one clock. Its result is a `Found`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from weft.base.config import EngineConfig
from weft.engine.events import FinishReason
from weft.memory.captures import ALL_CAPTURES, CaptureReasons
from weft.simulate.costs import CostModel
from weft.simulate.engine import SimulatedEngine
from weft.simulate.found import Found, together
from weft.simulate.oracle import Oracle
from weft.simulate.routing import ROUTERS, Routing
from weft.simulate.sessions import Arrivals, SimulatedSession
from weft.simulate.stepping import Simulated


class Simulation:
    """`replicas` engines share the memory and the tiers of `config` equally; `router` says which one gets a request.

    `tell` is called with every request that was answered.
    """

    def __init__(
        self,
        cost: CostModel,
        config: EngineConfig,
        sessions: Iterator[SimulatedSession],
        stride: int = 64,
        oracle: bool = True,
        tell: Callable[[Simulated], None] | None = None,
        captures: CaptureReasons = ALL_CAPTURES,
        alpha: float = 1.0,
        replicas: int = 1,
        router: str = "round-robin",
    ) -> None:
        sizes = ("memory_bytes", "host_bytes", "disk_bytes")
        each = replace(config, **{name: getattr(config, name) // replicas for name in sizes})
        self.engines = [
            SimulatedEngine(
                cost, each, stride, captures, alpha, partial(self._started, place), partial(self._ended, place)
            )
            for place in range(replicas)
        ]
        self.oracle = Oracle(cost.spec.cell) if oracle else None
        self._routing: Routing = ROUTERS[router if replicas > 1 else "round-robin"](self.engines)
        self._arrivals = Arrivals(sessions)
        self._tell = tell
        self._number = 0

    def run(self) -> Found:
        while True:
            busy = [engine for engine in self.engines if not engine.idle]
            following = self._arrivals.next_time()
            if following is not None and all(following <= engine.now for engine in busy):
                self._arrive()
            elif busy:
                # The engine that is furthest behind: whatever happens next, it does not happen before.
                engine = min(busy, key=lambda each: each.now)
                engine.step(following)
                self._routing.stepped(self.engines.index(engine))
            else:
                return self._finish()

    def _arrive(self) -> None:
        time, ask, session = self._arrivals.pop()
        sequence = Simulated(self._number, ask, session, time)
        if self.engines[0].refuses(ask.prompt + ask.answer):
            self._arrivals.go_on(session, max(time, min(engine.now for engine in self.engines)))
            return
        self._number += 1
        if self.oracle:
            self.oracle.look(ask)
        self.engines[self._routing.choose(sequence, time)].accept(sequence)

    def _started(self, place: int, sequence: Simulated) -> None:
        self._routing.started(place, sequence)

    def _ended(self, place: int, sequence: Simulated) -> None:
        self._routing.ended(place, sequence)
        if sequence.reason is not None:
            self._arrivals.go_on(sequence.session, self.engines[place].now)
        if sequence.reason is FinishReason.LENGTH and self._tell is not None:
            self._tell(sequence)

    def _finish(self) -> Found:
        founds = [engine.finish() for engine in self.engines]
        found = founds[0] if len(founds) == 1 else together(founds)
        if self.oracle:
            found.oracle_tokens, found.distinct_cells = self.oracle.hit_tokens, self.oracle.cells
        return found
