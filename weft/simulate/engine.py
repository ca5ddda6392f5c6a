"""One simulated engine: the real planner and memory, on a device that only keeps time."""

from __future__ import annotations

from collections.abc import Callable

from weft.base.config import EngineConfig
from weft.engine.copying import Copier
from weft.engine.events import FinishReason
from weft.engine.load import PromptCosts, ReplicaLoad, load_of
from weft.memory.captures import ALL_CAPTURES, CaptureReasons
from weft.memory.ledger import Ledger
from weft.memory.report import memory_stats
from weft.simulate.costs import CostModel, Work
from weft.simulate.found import Found, Refusals
from weft.simulate.stepping import Simulated, Stride, StridingPlanner, for_planner, from_planner, settle
from weft.simulate.tiering import timed_tiers

# Maximum number of samples of the course of memory.
SAMPLES = 400


class SimulatedEngine:
    """`stride` is how many tokens a decode may take at once while nothing else happens.

    `started` and `ended` are called with each request that got its first token, and that ended for any reason.
    """

    def __init__(
        self,
        cost: CostModel,
        config: EngineConfig,
        stride: int = 64,
        captures: CaptureReasons = ALL_CAPTURES,
        alpha: float = 1.0,
        started: Callable[[Simulated], None] = lambda _: None,
        ended: Callable[[Simulated], None] = lambda _: None,
    ) -> None:
        self.cost = cost
        self.config = config
        below = timed_tiers(cost.spec, config, cost.tiers)
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
            below=None if below is None else below[0],
        )
        self._copies = None if below is None else below[1]
        tiers = self.ledger.tiers
        self._copier = None if tiers is None or self._copies is None else Copier(tiers, self._copies)
        self.planner = StridingPlanner(self.ledger, config)
        self.found = Found(Refusals(config.max_length), Refusals(config.memory_bytes))
        self.now = 0.0
        self.costs = PromptCosts()
        self._stride = stride
        self._started, self._ended = started, ended
        self._prompt_tokens, self._prompt_pairs = 0, 0.0
        self._next_sample = 0.0
        self._last_seconds = 0.0
        self._arrived = False
        self._admission_is_settled = False
        self._kv_bytes, self._state_bytes = cost.kv_bytes_per_token, cost.spec.state_bytes

    # requests -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.planner.running or self.planner.leaving or len(self.planner.queue))

    def refuses(self, tokens: int) -> bool:
        """Return whether a request of this length could never run, as in the engine; count those."""
        if tokens > self.config.max_length:
            self.found.too_long.add(tokens, tokens)
            return True
        if not self.ledger.fits_alone(tokens):
            self.found.too_large.add(tokens, self.ledger.bytes_alone(tokens))
            return True
        return False

    def accept(self, sequence: Simulated) -> None:
        """Add a request to the queue at the time of its arrival; an idle engine has waited for it."""
        if self.idle:
            self.now = max(self.now, sequence.arrived_seconds)
        self.planner.queue.add(for_planner(sequence), self.planner.number)
        self._arrived = True

    def load(self) -> ReplicaLoad:
        return load_of(self.planner, self._prompt_tokens, self._prompt_pairs, self._last_seconds, self.costs)

    def _end(self, sequence: Simulated, reason: FinishReason) -> None:
        sequence.reason = reason
        self.planner.leave(for_planner(sequence))
        self._ended(sequence)

    def _fail_hopeless(self) -> None:
        for sequence in self.planner.failed:
            self.found.failed += 1
            self._end(from_planner(sequence), FinishReason.ERROR)
        self.planner.failed.clear()

    def _refuse_rest(self) -> None:
        """Refuse a waiting request: nothing runs and nothing can start, so it would wait for ever."""
        sequence = next(iter(self.planner.queue))
        self.planner.queue.remove(sequence)
        if self.ledger.tiers is not None:
            self.ledger.tiers.leave(sequence.id)
        self.found.failed += 1
        self._ended(from_planner(sequence))

    # steps ----------------------------------------------------------------------------------------------------------

    def step(self, following: float | None) -> None:
        """Compute a step. `following` is when the next request arrives, here or at another engine, if one does."""
        self.planner.stride = self._choose_stride(following)
        self._arrived = False
        self._move_copies()
        step = self.planner.plan()
        if self._copier is not None:
            self._copier.launch_loads()
        self._admission_is_settled = False
        self._fail_hopeless()
        if step is not None:
            self._fly(step)
            return
        upcoming = [time for time in (following, self._next_landing) if time is not None]
        if upcoming:
            self.now = max(self.now, min(upcoming))
        elif not self.planner.leaving:
            self._refuse_rest()
        self.planner.release_landed()

    def _move_copies(self) -> None:
        """Land copies and begin new ones, as the engine does before it plans."""
        if self._copier is not None and self._copies is not None:
            self._copies.now = self.now
            self._copier.land()
            self._copier.launch()

    @property
    def _next_landing(self) -> float | None:
        return None if self._copies is None else self._copies.next_landing

    def _choose_stride(self, following: float | None) -> int:
        """Return how many tokens decodes take at once: many while only they run, but not far past the next arrival."""
        planner, most = self.planner, self._most_at_once()
        waiting = len(planner.queue) > 0
        if self._arrived or planner.prefilling or not planner.decoding or (waiting and not self._admission_is_settled):
            return 1
        if waiting:
            # Waiting requests get memory when a running one ends, not before, or when what they load has landed.
            most = min(most, max(1, min(s.max_tokens - len(s.generated) for s in planner.decoding)))
            following = self._next_landing
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
        computed = sum(end - start for _, start, end, _ in step.prefills)
        pairs = sum((end - start) * (start + end) / 2 for _, start, end, _ in step.prefills)
        self._prompt_tokens += computed
        self._prompt_pairs += pairs
        self.costs.computed(computed, pairs, seconds)
        if self.ledger.tiers is not None:
            self.ledger.tiers.computed(computed, seconds)
        for planned, _, _, samples in step.prefills:
            if samples and from_planner(planned).first_seconds is None:
                from_planner(planned).first_seconds = self.now
                self._started(from_planner(planned))
        ended = settle(self.planner, step)
        for sequence in ended:
            self._note(sequence)
            self._end(sequence, FinishReason.LENGTH)
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

    def _sample(self) -> None:
        """Record the bytes in use by kind. With too many samples, drop every other one."""
        course, arena = self.found.course, self.ledger.arena
        course.append((self.now, {kind.value: arena.used(kind) * size for kind, size in arena.unit_bytes.items()}))
        if len(course) >= 2 * SAMPLES:
            del course[1::2]
        interval = self.now / SAMPLES if len(course) >= SAMPLES else 0.0
        self._next_sample = self.now + interval

    def finish(self) -> Found:
        """Return the results, when all requests have ended."""
        found = self.found
        found.seconds = self.now
        found.stats = memory_stats(self.ledger) | {
            "preemptions": self.planner.preemptions,
            "steps": self.planner.number,
            "learned": self.ledger.cache.valuation.popularity.table(),
        }
        return found
