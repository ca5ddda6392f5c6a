"""One run: requests arrive, the planner schedules them, memory caches, a clock advances. Its result is a `Found`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.base.config import EngineConfig
from weft.engine.events import FinishReason
from weft.memory.captures import ALL_CAPTURES, CaptureReasons
from weft.memory.ledger import Ledger
from weft.memory.report import memory_stats
from weft.simulate.costs import CostModel, Work
from weft.simulate.oracle import Oracle
from weft.simulate.sessions import Arrivals, SimulatedSession
from weft.simulate.stepping import Simulated, Stride, StridingPlanner, for_planner, from_planner, settle

# Maximum number of samples of the course of memory.
SAMPLES = 400


@dataclass(slots=True)
class Refusals:
    """Requests that exceed a bound even when alone. `bound` and `most` are tokens or bytes."""

    bound: int
    requests: int = 0
    tokens: int = 0  # prompt and answer of the longest
    most: int = 0  # what that one needs

    def add(self, tokens: int, needed: int) -> None:
        self.requests += 1
        if tokens > self.tokens:
            self.tokens, self.most = tokens, needed


@dataclass(slots=True)
class Found:
    """Results of a run. Lists are per request in the order of their ends, `course` is over time."""

    too_long: Refusals  # for `max_length`
    too_large: Refusals  # for memory
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    hit_tokens: int = 0
    oracle_tokens: int | None = None
    distinct_cells: int | None = None
    seconds: float = 0.0
    busy_seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    course: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> int:
        return self.too_long.requests + self.too_large.requests

    def first_token(self, share: float) -> float:
        """Return the time to first token in seconds that this share of the requests stayed below."""
        return float(np.quantile(self.first_token_seconds, share)) if self.first_token_seconds else 0.0


class Simulation:
    """`stride` is how many tokens a decode may take at once while nothing else happens."""

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
    ) -> None:
        self.cost = cost
        self.config = config
        self.ledger = Ledger(
            cost.spec,
            config.memory_bytes,
            config.max_sequences,
            config.max_length,
            cache=config.cache,
            eviction=config.eviction,
            capture_every=config.capture_every,
            captures=captures,
            alpha=alpha,
        )
        self.planner = StridingPlanner(self.ledger, config)
        self.oracle = Oracle(cost.spec.cell) if oracle else None
        self.found = Found(Refusals(config.max_length), Refusals(config.memory_bytes))
        self.now = 0.0
        self._arrivals = Arrivals(sessions)
        self._stride = stride
        self._tell = tell
        self._number = 0
        self._next_sample = 0.0
        self._last_seconds = 0.0
        self._admission_is_settled = False
        self._kv_bytes, self._state_bytes = cost.kv_bytes_per_token, cost.spec.state_bytes

    def run(self) -> Found:
        while True:
            arrived = self._arrive()
            self.planner.stride = self._choose_stride(arrived)
            step = self.planner.plan()
            self._admission_is_settled = False
            self._fail_hopeless()
            if step is None:
                following = self._arrivals.next_time()
                if following is None and not self.planner.running and not len(self.planner.queue):
                    return self._finish()
                if following is not None:
                    self.now = max(self.now, following)
                elif not self.planner.leaving:
                    self._refuse_rest()
                self.planner.release_landed()
                continue
            self._fly(step)

    # requests -------------------------------------------------------------------------------------------------------

    def _arrive(self) -> bool:
        arrived = False
        while (time := self._arrivals.next_time()) is not None and time <= self.now:
            time, ask, session = self._arrivals.pop()
            if self._refuses(ask.prompt + ask.answer):
                self._arrivals.go_on(session, self.now)
                continue
            sequence = Simulated(self._number, ask, session, time)
            self._number += 1
            if self.oracle:
                self.oracle.look(ask)
            self.planner.queue.add(for_planner(sequence), self.planner.number)
            arrived = True
        return arrived

    def _refuses(self, tokens: int) -> bool:
        """Return whether a request of this length could never run, as in the engine; count those."""
        if tokens > self.config.max_length:
            self.found.too_long.add(tokens, tokens)
            return True
        if not self.ledger.fits_alone(tokens):
            self.found.too_large.add(tokens, self.ledger.bytes_alone(tokens))
            return True
        return False

    def _fail_hopeless(self) -> None:
        for sequence in self.planner.failed:
            self.found.failed += 1
            self._end(from_planner(sequence), FinishReason.ERROR)
        self.planner.failed.clear()

    def _refuse_rest(self) -> None:
        """Refuse the waiting requests: nothing runs and nothing can start, so they would wait for ever."""
        sequence = next(iter(self.planner.queue))
        self.planner.queue.remove(sequence)
        self.found.failed += 1

    def _end(self, sequence: Simulated, reason: FinishReason) -> None:
        sequence.reason = reason
        self.planner.leave(for_planner(sequence))
        self._arrivals.go_on(sequence.session, self.now)

    # steps ----------------------------------------------------------------------------------------------------------

    def _choose_stride(self, arrived: bool) -> int:
        """Return how many tokens decodes take at once: many while only they run, but not far past the next arrival."""
        planner, most = self.planner, self._most_at_once()
        waiting = len(planner.queue) > 0
        if arrived or planner.prefilling or not planner.decoding or (waiting and not self._admission_is_settled):
            return 1
        if waiting:
            # Waiting requests get memory when a running one ends, not before.
            return min(most, max(1, min(s.max_tokens - len(s.generated) for s in planner.decoding)))
        following = self._arrivals.next_time()
        if following is None or not self._last_seconds:
            return most
        return max(1, min(most, round((following - self.now) / self._last_seconds)))

    def _most_at_once(self) -> int:
        """Return the longest stride for which there is memory.

        Token by token, few decodes leave their cell in one step; in a stride of a cell all do, each into a new slot.
        """
        ledger, running = self.ledger, len(self.planner.decoding)
        # Running sequences read from some of the points, at most one each.
        evictable = max(0, ledger.cache.points - len(ledger.leases))
        at_hand = ledger.arena.slabs - ledger.arena.used_slabs + evictable
        if not self._state_bytes or at_hand >= running:
            return self._stride
        return max(1, self._stride * at_hand // running)

    def _fly(self, step: Stride) -> None:
        seconds = self._seconds(step)
        self.now += seconds
        self.found.busy_seconds += seconds
        for planned, _, _, samples in step.prefills:
            if samples and from_planner(planned).first_seconds is None:
                from_planner(planned).first_seconds = self.now
        ended = settle(self.planner, step)
        for sequence in ended:
            self._end(sequence, FinishReason.LENGTH)
            self._note(sequence)
        # The next plan finds memory and queue as this one left them, so it would admit nothing either.
        self._admission_is_settled = not ended and not step.prefills and not self.planner.leaving
        if self.planner.leaving:
            self.planner.release_landed()
        if self.now >= self._next_sample:
            self._sample()

    def _seconds(self, step: Stride) -> float:
        """Return the cost of the step. Prompts and the first token of decodes share a step; others come one by one."""
        cost, cell = self.cost, self.cost.spec.cell
        written = sum(capture.keep and not capture.own for grant in step.grants.values() for capture in grant.captures)
        tokens, pairs = len(step.decode_seats), 0.0
        for _, start, end, _ in step.prefills:
            tokens += end - start
            pairs += (end - start) * (start + end) / 2
        lengths = float((step.decode_starts + step.counts / 2).sum()) if tokens else 0.0
        read = lengths * self._kv_bytes + len(step.decode_seats) * self._state_bytes
        # A decode writes its own checkpoint once per cell.
        folded = float(step.counts.sum()) / cell
        work = Work(tokens, pairs + lengths, read, (written + folded) * self._state_bytes)
        strides = int(step.counts.max()) if len(step.counts) else 1
        self._last_seconds = cost.seconds(work)
        if strides == 1:
            return self._last_seconds
        assert not step.prefills, "a prompt would be charged with every token of the stride"
        self._last_seconds = cost.seconds(Work(tokens, pairs + lengths, read, 0.0))
        # Towards the end fewer are left.
        share = float(step.counts.mean()) / strides
        later = Work(max(1, round(tokens * share)), share * lengths, share * read, 0.0)
        return cost.seconds(work) + (strides - 1) * cost.seconds(later)

    # results --------------------------------------------------------------------------------------------------------

    def _note(self, sequence: Simulated) -> None:
        found = self.found
        found.requests += 1
        found.prompt_tokens += sequence.ask.prompt
        found.answer_tokens += sequence.ask.answer
        if sequence.miss is not None:
            found.hit_tokens += sequence.miss.cached
        if sequence.first_seconds is not None:
            found.first_token_seconds.append(sequence.first_seconds - sequence.arrived_seconds)
        if self._tell is not None:
            self._tell(sequence)

    def _sample(self) -> None:
        """Record the bytes in use by kind. With too many samples, drop every other one."""
        course, arena = self.found.course, self.ledger.arena
        course.append((self.now, {kind.value: arena.used(kind) * size for kind, size in arena.unit_bytes.items()}))
        if len(course) >= 2 * SAMPLES:
            del course[1::2]
        interval = self.now / SAMPLES if len(course) >= SAMPLES else 0.0
        self._next_sample = self.now + interval

    def _finish(self) -> Found:
        found = self.found
        found.seconds = self.now
        found.stats = memory_stats(self.ledger) | {
            "preemptions": self.planner.preemptions,
            "steps": self.planner.number,
            "learned": self.ledger.cache.valuation.popularity.table(),
        }
        if self.oracle:
            found.oracle_tokens, found.distinct_cells = self.oracle.hit_tokens, self.oracle.cells
        return found
