"""The engine: plan, launch, settle. One loop with a pipeline of depth 0 or 1.

At depth 1 the next step is planned and launched while the last one is in flight. Sampled tokens feed it on the device,
so planning never waits for them. A sequence that turns out to be finished has computed one token too many, which is
dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from weft.base.config import EngineConfig
from weft.base.errors import InvalidField, RequestError
from weft.base.plan import Landing
from weft.base.tenants import tenant_digest
from weft.base.transfers import Transport
from weft.engine.assembly import PlannedStep
from weft.engine.constraint import Constraint, Constraints
from weft.engine.copying import Copier
from weft.engine.device import Device
from weft.engine.draft_model import DraftModel
from weft.engine.dropping import Dropping
from weft.engine.events import FinishReason, Output, Report
from weft.engine.exchange import check_departure, join
from weft.engine.landed import (
    accepted_tokens,
    add_scores,
    late_masks,
    learn,
    moved_step,
    note_verified,
    take_scores,
    undo_refused,
    verified_drafts,
    without_masks,
)
from weft.engine.load import ReplicaLoad, StepClock, load_of, planner_stats
from weft.engine.planner import Planner
from weft.engine.request import Request
from weft.engine.sequence import Sequence
from weft.memory.audit import audit, check_plan
from weft.memory.journal import Journal
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger
from weft.memory.report import cache_report, memory_stats
from weft.memory.spec import MemorySpec
from weft.speculate.drafting import Drafting


class Engine:
    """`constraints` compiles grammars; without it, requests may not have one. `drafting` defaults to the settings';
    `draft_model` decodes drafts."""

    def __init__(
        self,
        spec: MemorySpec,
        device: Device,
        config: EngineConfig,
        constraints: Constraints | None = None,
        drafting: Drafting | None = None,
        draft_model: DraftModel | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.config = config
        self._constraints = constraints
        self._identity = PrefixIdentity(spec.cell, form=config.form if config.exact else None)
        self.ledger = Ledger(
            spec,
            config.memory_bytes,
            config.max_sequences,
            config.max_length,
            cache=config.cache,
            eviction=config.eviction,
            capture_every=config.capture_every,
            remember_freed=config.paranoid,
            private_answers=config.exact,
        )
        below = config.host_bytes or config.disk_bytes or config.remote or config.arrivals_bytes
        self.copier = Copier.attach(self.ledger, device, config) if config.cache and below else None
        self.dropping = Dropping(self.ledger, self.copier, self._flush_drafts)
        self.exchange = None if transport is None else join(transport, device, self.ledger, config.departures_bytes)
        self.clock = StepClock(self.ledger.tiers)
        # Starts when a router subscribes; until then nothing is recorded.
        self.journal = Journal(self.ledger)
        if drafting is None and config.draft != "off":
            name = None if draft_model is None else draft_model.name
            drafting = Drafting(config.draft_tokens, shares=config.cache, model=name)
        assert drafting is None or drafting.most <= spec.draft_room, "a tail must have room for all drafts of a step"
        self.planner = Planner(self.ledger, config, drafting, draft_model)
        can = device.capabilities
        self._supplies = can.supply_masks
        self.planner.late_masks = can.supply_masks is not None
        self.planner.following = None if config.exact else can.follows
        if can.sizes is not None:
            self.planner.use_sizes(can.sizes)
        self._device = device
        self._sequences: dict[int, Sequence] = {}
        self._flights: deque[tuple[PlannedStep, Any]] = deque()
        # When the last flight landed, and the drafts that it carried; when the engine last had nothing to do.
        self._landed_at = self._resumed_at = 0.0
        self._landed_drafts = 0
        # Steps with drafts that have landed, and how many drafts of each row were right.
        self._unlearned: list[tuple[PlannedStep, dict[int, int]]] = []
        self._outputs: list[Output] = []
        # Sequences whose samples in flight are dropped, because they have no mask.
        self._maskless: set[int] = set()
        # Requests that are computed and whose prefix is still being sent.
        self._departing: set[int] = set()
        self._next_id = 0
        self._planning_seconds = 0.0
        self._seeds = np.random.default_rng(config.seed)

    # requests -------------------------------------------------------------------------------------------------------

    def constrain(self, request: Request) -> Constraint | None:
        """Compile a request's grammar. The only method that any thread may call."""
        if request.grammar is None:
            return None
        if self._constraints is None:
            raise RequestError("grammar: constrained decoding needs a tokenizer, and this model has none")
        return self._constraints(request.grammar, request.stop_tokens, request.salt)

    def add(self, request: Request, constraint: Constraint | None = None) -> int:
        """Add a request to the queue and return its number. Its constraint may be compiled beforehand."""
        length, limit = len(request.prompt), self.config.max_length
        if length < 1:
            raise InvalidField("prompt", "must have at least one token")
        if length > limit:
            raise InvalidField("prompt", f"has {length} tokens; max_length is {limit}")
        if request.send_to is not None:
            check_departure(request, self.ledger)
        max_tokens = min(request.params.max_tokens, limit - length)
        if not self.ledger.fits_alone(length + max_tokens):
            raise InvalidField(
                "prompt",
                f"of {length} tokens plus max_tokens {max_tokens} does not fit into the engine's memory of "
                f"{self.config.memory_bytes} bytes; shorten it or raise --memory",
            )
        if constraint is None:
            constraint = self.constrain(request)
        drawn = int(self._seeds.integers(1 << 63))
        seed = drawn if request.params.seed is None else request.params.seed
        identity = replace(self._identity, salt=request.salt)
        sequence = Sequence(self._next_id, request, max_tokens, seed, identity, constraint)
        if self.planner.drafting is not None:
            sequence.drafting = self.planner.drafts.begin(sequence)
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self.planner.queue.add(sequence, self.planner.number)
        if request.send_to is not None and self.exchange is not None:
            self.exchange.begin(sequence, tenant_digest(request.salt))
        return sequence.id

    def abort(self, number: int) -> None:
        """Abort a sequence at once, wherever it is. Ignores unknown and finished ones."""
        self._end(number, FinishReason.ABORT)

    def finish(self, number: int) -> None:
        """End a sequence as if it had stopped by itself, because the caller found a stop string."""
        self._end(number, FinishReason.STOP)

    def _end(self, number: int, reason: FinishReason) -> None:
        sequence = self._sequences.get(number)
        if sequence is None or (sequence.reason is not None and number not in self._departing):
            return
        if self.exchange is not None:
            self.exchange.abandon(number)
        if number in self._departing:
            self._departing.discard(number)
        else:
            self._finish(sequence, reason)
        self._outputs.append(Output(number, None, finish=reason))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.reason = reason
        if self.planner.drafting is not None:
            text, reused = sequence.tokens(0, sequence.length), sequence.report.cached_tokens
            self.planner.drafting.ended(sequence.identity.root, text, sequence.drafting, reused)
        if sequence.leaving:
            return  # it was about to be preempted; now it will not return
        if sequence.lease is None:
            self.planner.queue.remove(sequence)
            if self.ledger.tiers is not None:
                self.ledger.tiers.leave(sequence.id)
        else:
            self.planner.leave(sequence)

    def report(self, number: int) -> Report:
        """Return the report of a sequence; available until `forget`."""
        return self._sequences[number].report

    def forget(self, number: int) -> None:
        """Drop the report of a finished sequence."""
        sequence = self._sequences.get(number)
        if sequence is not None:
            assert sequence.reason is not None, "only a finished sequence can be removed"
            del self._sequences[number]

    @property
    def idle(self) -> bool:
        planner = self.planner
        busy = planner.running or planner.leaving or len(planner.queue) or self._flights or self._outputs
        busy = busy or self.dropping.busy or (self.exchange is not None and self.exchange.busy)
        return not (busy or (self.copier is not None and self.copier.busy))

    @property
    def in_flight(self) -> bool:
        """Whether steps are in flight, or sequences that have ended still hold memory because of them."""
        return bool(self._flights or self.planner.leaving)

    @property
    def copying(self) -> bool:
        """Whether paths are on their way between tiers."""
        return self.copier is not None and any(link.moving for link in self.copier.tiers.links)

    def write_behind(self) -> None:
        """Begin to save what a tier that outlives the process does not have yet. Call it while there is no work."""
        if self.copier is not None and self.idle:
            self.copier.launch(idle=True)

    def close(self) -> None:
        """Save what outlives the process, land the copies that are under way, close the tiers below and the device."""
        if self.exchange is not None:
            self.exchange.transport.close()
        try:
            if self.copier is not None:
                self.copier.close(self.dropping.finish)
        finally:
            self._device.close()

    # inspection -----------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop everything that no running sequence uses; return how many cached tokens are left."""
        self._flush_drafts()
        self.ledger.cache.clear()
        if self.ledger.tiers is not None:
            self.ledger.tiers.clear()
        return len(self.ledger.cache.trie) * self.ledger.spec.cell

    def begin_drop(self, number: int, tenant: bytes | None = None, prefix: bytes | None = None) -> None:
        """Drop prefixes from all tiers, and overwrite them on disk beside the steps; `take_dropped` has the answer.

        `tenant` is a tenant's digest, `prefix` the beginning of a cell's key; without either, everything is dropped.
        """
        if self.exchange is not None:
            self.exchange.drop(tenant, prefix)
        self.dropping.begin(number, tenant, prefix)
        self.journal.note_drop(tenant, prefix)

    def take_dropped(self) -> dict[int, dict[str, Any]]:
        """Return the answers of drops that are complete, by their numbers: the tokens dropped, and those still in use.

        `erased` is false, with a `reason`, if units of a file were not overwritten or objects of a store not dropped.
        """
        return self.dropping.take_answers()

    def _flush_drafts(self) -> None:
        """Drop all texts and states that drafts come from."""
        if self.planner.drafting is not None:
            self.planner.drafting.flush()
        if self.planner.drafts.model is not None:
            self.planner.drafts.model.flush()

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges by name: the planner's and the memory's."""
        own = planner_stats(self.planner) | {"planning_seconds": self._planning_seconds}
        if self.exchange is not None:
            own["transfers"] = self.exchange.stats()
        return own | memory_stats(self.ledger)

    def load(self) -> ReplicaLoad:
        """Return how busy the engine is, for a router."""
        clock = self.clock
        found = load_of(self.planner, clock.prompt_tokens, clock.prompt_pairs, clock.step_seconds, clock.costs)
        if self.exchange is None:
            return found
        return replace(found, send_bytes_per_second=self.exchange.transport.send_bytes_per_second)

    def cache_report(self, limit: int) -> dict[str, Any]:
        return cache_report(self.ledger, limit)

    # steps ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Plan and launch a step, settle landed steps, and return their outputs."""
        waited = False
        while self._flights and self.planner.awaits_drafts(self.clock.lost):
            self._settle(*self._flights.popleft())
            waited = True
        began = perf_counter()
        if not self.planner.running and not self._flights:
            self._resumed_at = began
        if self.copier is not None:
            self.copier.land()
        self.dropping.advance()
        if self.copier is not None:
            # Before the plan, which may evict what ended in the last step.
            self.copier.launch()
        self.take_transfers()
        self.planner.masks.begin_step()
        self._take_masks()
        step = self.planner.plan()
        self._planning_seconds += perf_counter() - began
        self._fail_hopeless()
        if step is not None:
            if self.config.paranoid:
                check_plan(step.plan, self.ledger)
            # Before the launch: a CPU computes during it.
            self.clock.launched(not self._flights, waited)
            self._flights.append((step, self._device.launch(step.plan)))
            if self.exchange is not None:
                self.exchange.launched(*self._flights[-1])
        if self.copier is not None:
            self.copier.launch_loads(wait=not self._flights)
        if self.exchange is not None and not self._flights and self.ledger.departures is not None:
            # What is being sent may hold the memory that requests wait for.
            self.take_transfers(wait=self.ledger.departures.in_flight)
        while len(self._flights) > (self.config.depth if step is not None else 0):
            self._settle(*self._flights.popleft())
        if step is not None and len(step.plan.sampling.late):
            self._supply_masks(step)
        if step is None and not self._outputs:
            self.planner.masks.wait()
        if self._unlearned:
            learn(self._unlearned, self.planner.drafting)
            self._unlearned.clear()
        if self.config.paranoid:
            audit(self.ledger)
            if self.planner.drafts.model is not None:
                audit(self.planner.drafts.model.ledger)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _supply_masks(self, step: PlannedStep) -> None:
        """Send the masks that depend on the step before, which has landed by now, to the step in flight.

        A row whose mask takes too long is preempted, and what it samples is dropped, so that no other row waits.
        """
        assert self._supplies is not None
        self._supplies(self._flights[-1][1], late_masks(step))
        for sequence in without_masks(step):
            self._maskless.add(sequence.id)
            self.planner.leave(sequence)

    def _take_masks(self) -> None:
        """Continue with the sequences whose masks were found beside the steps, or end them."""
        for sequence, error in self.planner.masks.take_found():
            if sequence.reason is not None:
                continue
            if self.planner.by_seat[sequence.seat] is sequence:
                self.planner.sampling.note_mask(sequence)
            output, constraint = Output(sequence.id, None), sequence.constraint
            assert constraint is not None
            if error is not None:
                self._fail(sequence, output, error)
            elif constraint.ended or len(sequence.generated) >= sequence.max_tokens:
                output.finish = FinishReason.STOP if constraint.ended else FinishReason.LENGTH
                self._finish(sequence, output.finish)
            if output.finish is not None:
                self._outputs.append(output)

    def take_transfers(self, wait: bool = False) -> None:
        """Handle what has happened to transfers of prefixes. Call it between steps."""
        if self.exchange is None:
            return
        self.exchange.poll(wait)
        ended, self.exchange.ended = self.exchange.ended, []
        for number, error in ended:
            sequence = self._sequences.get(number)
            if number in self._departing:
                self._departing.discard(number)
            elif sequence is None or sequence.reason is not None:
                continue
            else:
                # Without its destination, computing the rest is of no use.
                self._finish(sequence, FinishReason.ERROR)
            finish = FinishReason.LENGTH if error is None else FinishReason.ERROR
            self._outputs.append(Output(number, None, finish=finish, error=error))

    def on_transfers(self, wake: Callable[[], None]) -> None:
        """Let `wake` be called, from any thread, when there is something for `take_transfers`."""
        if self.exchange is not None:
            self.exchange.transport.wake = wake
            # What was reported before may have rung no bell, and rings none until it is polled.
            wake()

    def _fail_hopeless(self) -> None:
        for sequence in self.planner.failed:
            if self.exchange is not None:
                self.exchange.abandon(sequence.id)
            error = f"out of memory at {sequence.length} tokens, with nothing left to evict; raise --memory"
            self._finish(sequence, FinishReason.ERROR)
            self._outputs.append(Output(sequence.id, None, finish=FinishReason.ERROR, error=error))
        self.planner.failed.clear()

    def _settle(self, step: PlannedStep, flight: Any) -> None:
        if self.exchange is not None:
            self.exchange.serve_until(flight)
        landing, step = self._device.land(flight), moved_step(step, self.ledger)
        if self.planner.drafting is not None or self.planner.pacing.bounded:
            self._observe(step)
        plan, ledger, planner = step.plan, self.ledger, self.planner
        self.clock.landed(plan)
        planner.landed = plan.number
        verified = self.verify(step, landing)
        ends = undo_refused(step, verified, ledger, planner) if verified else plan.end
        ledger.settle_each(plan.seat[step.plain_rows], ends[step.plain_rows])
        for row, grant in step.grants.items():
            sequence = step.sequences[row]
            assert sequence.lease is not None
            drafts = step.drafts[row].tokens[: verified[row]] if row in verified and row not in step.void else ()
            end = int(ends[row])
            sequence.name_cells(end // ledger.cell, drafts)
            ledger.settle(sequence.lease, grant, end)
        if self.exchange is not None:
            self.exchange.landed_step(step)
        if verified:
            note_verified(step, verified, planner)
            self._unlearned.append((step, verified))
        take_scores(step, landing)
        self.take_tokens(step, landing, verified)
        if planner.leaving:
            planner.release_landed()

    def _observe(self, step: PlannedStep) -> None:
        """Learn how long a step took: from the landing before it to its own.

        At depth 1, a step with drafts may be planned after the landing before it: then this includes what the device
        waits for the host. The step after it may wait too: without drafts of its own, it does not count.
        """
        now, plan, after_drafts = perf_counter(), step.plan, self._landed_drafts > 0
        seconds, tokens = now - max(self._resumed_at, self._landed_at), len(plan.tokens)
        self._landed_at, self._landed_drafts = now, (drafts := int(plan.drafts.counts.sum()) if step.drafts else 0)
        if after_drafts and not drafts:
            return
        if tokens == len(step.sequences) + drafts:
            self.planner.pacing.costs.observe(tokens, drafts, seconds)
        else:
            self.planner.pacing.observe(plan, seconds)

    def verify(self, step: PlannedStep, landing: Landing) -> dict[int, int]:
        """Return, by row, how many drafts equal the tokens chosen in their place. Devices that follow rows agree."""
        return verified_drafts(step, landing)

    def take_tokens(self, step: PlannedStep, landing: Landing, verified: dict[int, int]) -> None:
        rows, scores, tell = step.plan.sampled.tolist(), landing.sampled_scores, self._outputs.append
        for index, row, token in accepted_tokens(step, landing, verified):
            sequence = step.sequences[row]
            if sequence.id in self._maskless:
                self._maskless.discard(sequence.id)
                continue
            if sequence.reason is not None:
                continue  # a token beyond its end
            generated = sequence.generated
            generated.append(token)
            output = Output(sequence.id, token)
            tell(output)
            if scores is not None:
                add_scores(output, sequence, scores, index)
            if landing.digests is not None and sequence.request.params.logits_digest:
                output.digest = int(landing.digests[index])
            if token in sequence.stop_tokens or (sequence.constraint and self._follow(sequence, output)):
                output.finish = FinishReason.STOP
                self._finish(sequence, FinishReason.STOP)
            elif output.finish is None and not sequence.awaits_mask and len(generated) >= sequence.max_tokens:
                output.finish = FinishReason.LENGTH
                self._finish(sequence, FinishReason.LENGTH)
        if len(rows) < len(step.sequences):
            self._finish_silent(step)

    def _follow(self, sequence: Sequence, output: Output) -> bool:
        """Advance in the sequence's grammar; return whether the answer ends here. Sets an error at a dead end."""
        constraint, token = sequence.constraint, output.token
        assert constraint is not None
        assert token is not None
        try:
            found = self.planner.masks.take(sequence, token)
        except RequestError as error:
            self._fail(sequence, output, error)
            return False
        self.planner.sampling.note_mask(sequence)
        return found and constraint.ended

    def _fail(self, sequence: Sequence, output: Output, error: RequestError) -> None:
        output.finish, output.error, output.error_field = FinishReason.ERROR, str(error), error.field
        self._finish(sequence, FinishReason.ERROR)

    def _finish_silent(self, step: PlannedStep) -> None:
        """Finish sequences that generate no token once their prompt is computed."""
        for sequence, end in zip(step.sequences, step.plan.end.tolist(), strict=True):
            if sequence.max_tokens == 0 and sequence.reason is None and end == len(sequence.known):
                departs = self.exchange is not None and self.exchange.computed(sequence)
                self._finish(sequence, FinishReason.LENGTH)
                if departs:
                    self._departing.add(sequence.id)
                else:
                    self._outputs.append(Output(sequence.id, None, finish=FinishReason.LENGTH))
