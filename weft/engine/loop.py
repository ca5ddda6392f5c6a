"""The engine: plan, launch, settle. One loop with a pipeline of depth 0 or 1.

At depth 1 the next step is planned and launched while the last one is in flight. Sampled tokens feed it on the device,
so planning never waits for them. A sequence that turns out to be finished has computed one token too many, which is
dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from weft.base.companions import Companion
from weft.base.config import EngineConfig
from weft.base.constraint import Constraint, Constraints
from weft.base.errors import EngineStopped, InvalidField, RequestError
from weft.base.plan import Landing
from weft.base.tenants import tenant_digest
from weft.base.transfers import Transport
from weft.drafting.model import DraftModel
from weft.drafting.policy.choosing import Drafting
from weft.engine.assembly import PlannedStep
from weft.engine.copying import CLOSING_SECONDS, Copier, tiers_below
from weft.engine.device import Device
from weft.engine.events import FinishReason, Output, Report
from weft.engine.exchange import NO_DEPARTURES, Exchange
from weft.engine.landed import (
    accepted_tokens,
    add_scores,
    awaited_masks,
    drafted_samples,
    learn,
    moved_step,
    note_verified,
    take_scores,
    take_vectors,
    undo_refused,
    verified_drafts,
    without_masks,
)
from weft.engine.load import ReplicaLoad, StepClock, load_of, planner_stats
from weft.engine.planner import Planner
from weft.engine.request import Request, check_vector
from weft.engine.saved.prompts import NOT_HERE, SavedPrompts
from weft.engine.sequence import Sequence
from weft.engine.tracing.events import Runs
from weft.engine.tracing.tracer import Tracer, answers_to, facts_of, is_watched
from weft.memory.audit import audit, check_plan
from weft.memory.dropping import Dropping
from weft.memory.journal import Journal
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger, MakeTiers
from weft.memory.outline import outline
from weft.memory.report import cache_report, memory_stats
from weft.memory.saved.file import SavedModel
from weft.memory.spec import MemorySpec
from weft.wire.messages import MAX_WORDS

log = logging.getLogger("weft")


def ledger_of(
    spec: MemorySpec,
    config: EngineConfig,
    below: MakeTiers | None,
    departures_bytes: int,
    now: Callable[[], float] = perf_counter,
) -> Ledger:
    """Return a ledger as the configuration asks for, over the tiers `below`."""
    return Ledger(
        spec,
        config.memory_bytes,
        config.max_sequences,
        config.max_length,
        cache=config.cache,
        eviction=config.eviction,
        capture_every=config.capture_every,
        remember_freed=config.paranoid,
        private_answers=config.exact,
        below=below,
        departures_bytes=departures_bytes,
        retain_share=config.retain_share,
        now=now,
    )


class Engine:
    """`constraints` compiles grammars; without it, requests may not have one. `drafting` defaults to the settings';
    `draft_model` decodes drafts. `now` is a clock in seconds; a closing engine saves for up to `closing_seconds`. With
    what it `saves`, prompts go to files and come from them."""

    # Only while a client watches.
    tracer: Tracer | None = None

    def __init__(
        self,
        spec: MemorySpec,
        device: Device,
        config: EngineConfig,
        constraints: Constraints | None = None,
        drafting: Drafting | None = None,
        draft_model: DraftModel | None = None,
        transport: Transport | None = None,
        now: Callable[[], float] = perf_counter,
        closing_seconds: float = CLOSING_SECONDS,
        saves: SavedModel | None = None,
    ) -> None:
        self.config = config
        self._constraints = constraints
        self._device = device
        self._now = now
        self._identity = PrefixIdentity(spec.cell, form=config.form if config.exact else None)
        departures_bytes = 0 if transport is None else config.departures_bytes
        self.ledger = ledger_of(spec, config, tiers_below(spec, config, device, now), departures_bytes, now)
        tiers, can = self.ledger.tiers, device.capabilities
        # Asked once: with masks that follow, every step waits for this call.
        self._send_masks = can.supply_masks
        self.copier: Copier | None = None
        if tiers is not None and can.tiers is not None:
            self.copier = Copier(tiers, can.tiers, now, closing_seconds)
        self.dropping = Dropping(self.ledger, self.copier, self._flush_drafts)
        self.exchange: Exchange | None = None
        if transport is not None:
            parts = self.ledger, tiers, self.ledger.departures
            self.exchange = Exchange(transport, device, *parts, self._end_transfer, now)
        self._retentions = self.ledger.retentions
        self.saved: SavedPrompts | None = None
        if saves is not None:
            engine = (self.add, self.abort, self._end_transfer)
            self.saved = SavedPrompts(device, self.ledger.carried, saves, self._cells_of, *engine)
        companions = (self.copier, self.dropping, self.exchange, self._retentions, self.saved)
        self._companions: list[Companion] = [each for each in companions if each is not None]
        # Starts when a router subscribes; until then nothing is recorded.
        self.journal = Journal(self.ledger)
        if drafting is None and config.draft != "off":
            name = None if draft_model is None else draft_model.name
            drafting = Drafting(config.draft_tokens, shares=config.cache, model=name)
        assert drafting is None or drafting.most <= spec.draft_room, "a tail must have room for all drafts of a step"
        self.planner = Planner(self.ledger, config, drafting, draft_model, can)
        pacing = self.planner.pacing
        observes = drafting is not None or pacing.bounded
        self.clock = StepClock(now, None if tiers is None else tiers.computed, pacing.observe if observes else None)
        self._sequences: dict[int, Sequence] = {}
        self._flights: deque[tuple[PlannedStep, Any]] = deque()
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

    def add(self, request: Request, constraint: Constraint | None = None, save_to: Path | None = None) -> int:
        """Add a request to the queue and return its number. Its constraint may be compiled beforehand.

        With `save_to`, its prompt is written to this new file, and the request ends when it is.
        """
        done = 0 if request.answered is None else len(request.answered)
        length, limit = len(request.prompt) + done, self.config.max_length
        if length == done:
            raise InvalidField("prompt", "must have at least one token")
        if request.answered is not None and (request.grammar is not None or request.send_to is not None):
            raise InvalidField("grammar", "must not be set for a fork: where the answer stands in it is not known")
        if length > limit:
            raise InvalidField("prompt", f"has {length} tokens; max_length is {limit}")
        check_vector(request)
        if request.send_to is not None:
            if self.exchange is None:
                raise InvalidField("send_to", NO_DEPARTURES)
            self.exchange.check(request)
        if save_to is not None:
            self._saved_prompts("prompt").check(request)
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
        sequence = Sequence(self._next_id, request, done + max_tokens, seed, identity, constraint)
        if self.planner.drafting is not None and request.params.vector_from is None:
            sequence.drafting = self.planner.drafts.begin(sequence)
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self.planner.queue.add(sequence, self.planner.number)
        if self.tracer is not None:
            self.tracer.added(sequence)
        if request.send_to is not None and self.exchange is not None:
            self.exchange.begin(sequence, tenant_digest(request.salt))
        if save_to is not None and self.saved is not None:
            self.saved.expect(sequence.id, save_to)
        return sequence.id

    def _cells_of(self, salt: bytes) -> PrefixIdentity:
        """Return what names the cells of prompts with a salt."""
        return replace(self._identity, salt=salt)

    def _saved_prompts(self, field: str) -> SavedPrompts:
        if self.saved is None:
            raise InvalidField(field, NOT_HERE)
        return self.saved

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
        self._abandon(number)
        if number in self._departing:
            self._departing.discard(number)
        else:
            self._finish(sequence, reason)
        self._outputs.append(Output(number, None, finish=reason))

    def _abandon(self, number: int) -> None:
        """Let the prompt of a request go to no other engine, and to no file."""
        if self.exchange is not None:
            self.exchange.abandon(number)
        if self.saved is not None:
            self.saved.abandon(number)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.reason = reason
        if self.tracer is not None:
            self.tracer.finishes(sequence.id)
        # Prompts of vectors are no texts that answers continue.
        if self.planner.drafting is not None and sequence.request.params.vector_from is None:
            text, drafts = sequence.tokens(0, sequence.length), sequence.drafting
            root = sequence.identity.root if drafts is None else drafts.salt
            self.planner.drafting.ended(root, text, drafts, sequence.report.cached_tokens)
        if sequence.leaving:
            return  # it was about to be preempted; now it will not return
        if sequence.lease is None:
            self.planner.queue.remove(sequence)
            self.ledger.withdraw(sequence.id)
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
        return not (busy or any(each.busy for each in self._companions))

    @property
    def in_flight(self) -> bool:
        """Whether steps are in flight, or sequences that have ended still hold memory because of them."""
        return bool(self._flights or self.planner.leaving)

    @property
    def copying(self) -> bool:
        """Whether paths are on their way between tiers."""
        return self.copier is not None and self.copier.tiers.moving

    def write_behind(self) -> None:
        """Begin to save what a tier that outlives the process does not have yet. Call it while there is no work."""
        if self.copier is not None and self.idle:
            self.copier.launch(idle=True)

    def close(self) -> None:
        """Save what outlives the process, land the copies that are under way, close the tiers below and the device."""
        try:
            for each in reversed(self._companions):
                each.close()
        except EngineStopped as error:
            log.warning("what was not saved yet is lost: %s", error)
        finally:
            if self.copier is not None:
                self.copier.tiers.close()
            self._device.close()

    # inspection -----------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop everything that no running sequence uses; return how many cached tokens are left."""
        self._flush_drafts()
        return self.ledger.clear(tiers=True)

    def begin_drop(self, number: int, tenant: bytes | None = None, prefix: bytes | None = None) -> None:
        """Drop prefixes from all tiers, and overwrite them on disk beside the steps; `take_dropped` has the answer.

        `tenant` is a tenant's digest, `prefix` the beginning of a cell's key; without either, everything is dropped.
        """
        if self.exchange is not None:
            self.exchange.drop(tenant, prefix)
        if self.saved is not None:
            self.saved.drop(tenant, prefix)
        self.dropping.begin(number, tenant, prefix)
        self.journal.note_drop(tenant, prefix)

    def take_dropped(self) -> dict[int, dict[str, Any]]:
        """Return the answers of drops that are complete, by their numbers: the tokens dropped, and those still in use.

        `erased` is false, with a `reason`, if units of a file were not overwritten or objects of a store not dropped.
        """
        return self.dropping.take_answers()

    def begin_load(self, number: int, path: Path, salt: bytes, share: float) -> None:
        """Load a prompt from a file, for requests with this salt; `take_loaded` has the answer.

        A `share` of its cells is computed again first. The caller has checked who wrote the file.
        """
        self._saved_prompts("file").load(number, path, salt, tenant_digest(salt), share)

    def take_loaded(self) -> dict[int, dict[str, Any]]:
        """Return the answers of loads that have ended, by their numbers: the tokens, or an `error` and its status."""
        return {} if self.saved is None else self.saved.take_answers()

    def _flush_drafts(self) -> None:
        """Drop all texts and states that drafts come from."""
        if self.planner.drafting is not None:
            self.planner.drafting.flush()
        if self.planner.drafts.model is not None:
            self.planner.drafts.model.flush()

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges by name: the planner's and the memory's."""
        self._retentions.land()
        own = planner_stats(self.planner) | {"planning_seconds": self._planning_seconds}
        if self.exchange is not None:
            own["transfers"] = self.exchange.stats()
        if self.saved is not None:
            own["files"] = self.saved.stats()
        return own | memory_stats(self.ledger)

    def load(self) -> ReplicaLoad:
        """Return how busy the engine is, for a router."""
        clock = self.clock
        found = load_of(self.planner, clock.prompt_tokens, clock.prompt_pairs, clock.step_seconds, clock.costs)
        if self.exchange is None:
            return found
        return replace(found, send_bytes_per_second=self.exchange.transport.send_bytes_per_second)

    def cache_report(self, limit: int) -> dict[str, Any]:
        return cache_report(self.ledger, limit) if limit else outline(self.ledger)

    def watch(self, wanted: bool) -> None:
        """Begin or cease to note what requests and steps do. Call it between steps; again, to begin with what runs."""
        if wanted and self.tracer is None:
            self.tracer = Tracer(self.planner, self._sequences.values, self._now)
            self._companions.append(self.tracer)
        if wanted and self.tracer is not None:
            self.tracer.open()
        elif self.tracer is not None:
            self._companions.remove(self.tracer)
            self.tracer = None

    def request_facts(self, name: str) -> list[Runs]:
        """Return what is known of the sequences of a request that wait or run."""
        at = 1000 * time.time()
        found = (each for each in self._sequences.values() if is_watched(each))
        return [facts_of(each, self.ledger, at) for each in found if answers_to(each.request.name, name)]

    # steps ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Plan and launch a step, settle landed steps, and return their outputs."""
        waited = self._await_drafts()
        step = self._plan()
        if step is not None:
            self._launch(step, waited)
        for each in self._companions:
            each.attend(idle=not self._flights)
        while len(self._flights) > (self.config.depth if step is not None else 0):
            self._settle(*self._flights.popleft())
        if step is not None and len(step.plan.sampling.awaiting_mask):
            self._supply_masks(step)
        if step is None and not self._outputs:
            self.planner.masks.wait()
        self._learn()
        outputs, self._outputs = self._outputs, []
        if self.tracer is not None:
            self.tracer.ended(outputs)
        return outputs if self.saved is None else self.saved.own(outputs, self.forget)

    def _await_drafts(self) -> bool:
        """Settle the steps in flight if the next one should wait for their drafts; return whether it did."""
        waited = False
        while self._flights and self.planner.awaits_drafts(self.clock.lost):
            self._settle(*self._flights.popleft())
            waited = True
        return waited

    def _plan(self) -> PlannedStep | None:
        """Take in what has happened since the last step, and plan the next one."""
        began = self._now()
        if not self.planner.running and not self._flights:
            self.clock.resumed(began)
        for each in self._companions:
            each.land()
        for each in self._companions:
            each.launch()
        self.planner.masks.begin_step()
        self._take_masks()
        step = self.planner.plan()
        self._planning_seconds += self._now() - began
        self._fail_hopeless()
        return step

    def _launch(self, step: PlannedStep, waited: bool) -> None:
        if self.config.paranoid:
            check_plan(step.plan, self.ledger)
        # Before the launch: a CPU computes during it.
        self.clock.launched(not self._flights, waited)
        flight = self._device.launch(step.plan)
        self._flights.append((step, flight))
        for each in self._companions:
            each.launched(step, flight)

    def _learn(self) -> None:
        """Learn from landed drafts, which the launch of the next step has not waited for, and audit if asked to."""
        if self._unlearned:
            learn(self._unlearned, self.planner.drafting)
            self._unlearned.clear()
        if self.config.paranoid:
            audit(self.ledger)
            if self.planner.drafts.model is not None:
                audit(self.planner.drafts.model.ledger)

    def _supply_masks(self, step: PlannedStep) -> None:
        """Send the masks that depend on the step before, which has landed by now, to the step in flight.

        A row whose mask takes too long is preempted, and what it samples is dropped, so that no other row waits.
        """
        assert self._send_masks is not None
        self._send_masks(self._flights[-1][1], awaited_masks(step))
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

    def take_transfers(self) -> None:
        """Handle what has happened to transfers of prefixes. Call it between steps."""
        if self.exchange is not None:
            self.exchange.launch()

    def _end_transfer(self, number: int, error: str | None) -> None:
        """End a request whose transfer is over."""
        sequence = self._sequences.get(number)
        if number in self._departing:
            self._departing.discard(number)
        elif sequence is None or sequence.reason is not None:
            return
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
            self._abandon(sequence.id)
            error = f"out of memory at {sequence.length} tokens, with nothing left to evict; raise --memory"
            self._finish(sequence, FinishReason.ERROR)
            self._outputs.append(Output(sequence.id, None, finish=FinishReason.ERROR, error=error))
        self.planner.failed.clear()

    def _settle(self, step: PlannedStep, flight: Any) -> None:
        began = self._now()
        if self.exchange is not None:
            self.exchange.serve_until(flight)
        landing = self._device.land(flight)
        # Only if the device has work meanwhile, the host has time.
        self.planner.drafts.note_wait(self._now() - began if self._flights else 0.0)
        step = moved_step(step, self.ledger)
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
        for each in self._companions:
            each.landed(step)
        if verified:
            note_verified(step, verified, planner)
            self._unlearned.append((step, verified))
        take_scores(step, landing)
        take_vectors(step, landing)
        self.take_tokens(step, landing, verified)
        if planner.leaving:
            planner.release_landed()

    def verify(self, step: PlannedStep, landing: Landing) -> dict[int, int]:
        """Return, by row, how many drafts equal the tokens chosen in their place. Devices that follow rows agree."""
        return verified_drafts(step, landing)

    def take_tokens(self, step: PlannedStep, landing: Landing, verified: dict[int, int]) -> None:
        rows, scores, tell = step.plan.sampled.tolist(), landing.sampled_scores, self._outputs.append
        drafted = set() if scores is None else drafted_samples(step, verified)
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
                add_scores(output, sequence, scores, index, index in drafted)
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
        output.finish, output.error, output.error_field = FinishReason.ERROR, str(error)[:MAX_WORDS], error.field
        self._finish(sequence, FinishReason.ERROR)

    def _finish_silent(self, step: PlannedStep) -> None:
        """Finish sequences that generate no token once their prompt is computed."""
        for sequence, end in zip(step.sequences, step.plan.end.tolist(), strict=True):
            # One that awaits a mask has its last token: its grammar says how the answer ends.
            is_done = sequence.max_tokens == len(sequence.generated) and not sequence.awaits_mask
            if is_done and sequence.reason is None and end == len(sequence.known):
                departs = self.exchange is not None and self.exchange.computed(sequence)
                departs = departs or (self.saved is not None and self.saved.computed(sequence))
                self._finish(sequence, FinishReason.LENGTH)
                if departs:
                    self._departing.add(sequence.id)
                else:
                    self._outputs.append(Output(sequence.id, None, finish=FinishReason.LENGTH))
