"""The engine: plan, launch, settle. One loop with a pipeline of depth 0 or 1.

At depth 1 the next step is planned and launched while the last one is in flight. Sampled tokens feed it on the device,
so planning never waits for them. A sequence that turns out to be finished has computed one token too many, which is
dropped.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import numpy as np

from weft.base.config import EngineConfig
from weft.base.errors import InvalidField, RequestError
from weft.base.plan import Landing, Scores
from weft.engine.assembly import PlannedStep
from weft.engine.constraint import Constraint, Constraints
from weft.engine.copying import Copier
from weft.engine.device import Device
from weft.engine.events import FinishReason, Output, Report, Top
from weft.engine.planner import Planner
from weft.engine.request import Request
from weft.engine.sequence import Sequence
from weft.memory.audit import audit, check_plan
from weft.memory.ledger import Ledger
from weft.memory.report import cache_report, memory_stats
from weft.memory.spec import MemorySpec


class Engine:
    """`constraints` compiles grammars; without it, requests may not have one."""

    def __init__(
        self, spec: MemorySpec, device: Device, config: EngineConfig, constraints: Constraints | None = None
    ) -> None:
        self.config = config
        self._constraints = constraints
        self.ledger = Ledger(
            spec,
            config.memory_bytes,
            config.max_sequences,
            config.max_length,
            cache=config.cache,
            eviction=config.eviction,
            capture_every=config.capture_every,
            remember_freed=config.paranoid,
        )
        tiered = config.cache and (config.host_bytes or config.disk_bytes)
        self.copier = Copier.attach(self.ledger, device, config) if tiered else None
        self.planner = Planner(self.ledger, config)
        self._device = device
        self._sequences: dict[int, Sequence] = {}
        self._flights: deque[tuple[PlannedStep, Any]] = deque()
        self._outputs: list[Output] = []
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
        return self._constraints(request.grammar, request.stop_tokens)

    def add(self, request: Request, constraint: Constraint | None = None) -> int:
        """Add a request to the queue and return its number. Its constraint may be compiled beforehand."""
        length, limit = len(request.prompt), self.config.max_length
        if length < 1:
            raise InvalidField("prompt", "must have at least one token")
        if length > limit:
            raise InvalidField("prompt", f"has {length} tokens; max_length is {limit}")
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
        sequence = Sequence(self._next_id, request, max_tokens, seed, self.ledger.spec.cell, constraint)
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self.planner.queue.add(sequence, self.planner.number)
        return sequence.id

    def abort(self, number: int) -> None:
        """Abort a sequence at once, wherever it is. Ignores unknown and finished ones."""
        self._end(number, FinishReason.ABORT)

    def finish(self, number: int) -> None:
        """End a sequence as if it had stopped by itself, because the caller found a stop string."""
        self._end(number, FinishReason.STOP)

    def _end(self, number: int, reason: FinishReason) -> None:
        sequence = self._sequences.get(number)
        if sequence is None or sequence.reason is not None:
            return
        self._finish(sequence, reason)
        self._outputs.append(Output(number, None, finish=reason))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.reason = reason
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
        return not (busy or (self.copier is not None and self.copier.busy))

    def close(self) -> None:
        """Land the copies that are under way, and close the tier below."""
        if self.copier is not None:
            self.copier.close()

    # inspection -----------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop everything that no running sequence uses; return how many cached tokens are left."""
        self.ledger.cache.clear()
        if self.ledger.tiers is not None:
            self.ledger.tiers.clear()
        return len(self.ledger.cache.trie) * self.ledger.spec.cell

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges by name: the planner's and the memory's."""
        planner = self.planner
        own = {
            "running": planner.running + len(planner.leaving),
            "waiting": len(planner.queue),
            "preemptions": planner.preemptions,
            "steps": planner.number,
            "planning_seconds": self._planning_seconds,
        }
        return own | memory_stats(self.ledger)

    def cache_report(self, limit: int) -> dict[str, Any]:
        return cache_report(self.ledger, limit)

    # steps ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Plan and launch a step, settle landed steps, and return their outputs."""
        began = perf_counter()
        if self.copier is not None:
            self.copier.land()
            # Before the plan, which may evict what ended in the last step.
            self.copier.launch(stepping=True)
        step = self.planner.plan()
        self._planning_seconds += perf_counter() - began
        self._fail_hopeless()
        if step is not None:
            if self.config.paranoid:
                check_plan(step.plan, self.ledger)
            self._flights.append((step, self._device.launch(step.plan)))
        if self.copier is not None:
            self.copier.clock.launched(alone=step is not None and len(self._flights) == 1)
            self.copier.launch(stepping=bool(self._flights))
        while len(self._flights) > (self.config.depth if step is not None else 0):
            self._settle(*self._flights.popleft())
        if self.config.paranoid:
            audit(self.ledger)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _fail_hopeless(self) -> None:
        for sequence in self.planner.failed:
            error = f"out of memory at {sequence.length} tokens, with nothing left to evict; raise --memory"
            self._finish(sequence, FinishReason.ERROR)
            self._outputs.append(Output(sequence.id, None, finish=FinishReason.ERROR, error=error))
        self.planner.failed.clear()

    def _settle(self, step: PlannedStep, flight: Any) -> None:
        landing = self._device.land(flight)
        plan, ledger, planner = step.plan, self.ledger, self.planner
        if self.copier is not None:
            self.copier.clock.landed(plan)
        planner.landed = plan.number
        ledger.settle_each(plan.seat[step.plain_rows], plan.end[step.plain_rows])
        for row, grant in step.grants.items():
            sequence = step.sequences[row]
            assert sequence.lease is not None
            sequence.name_cells(grant.end // ledger.spec.cell)
            ledger.settle(sequence.lease, grant, grant.end)
        self._take_scores(step, landing)
        self.take_tokens(step, landing)
        if planner.leaving:
            planner.release_landed()

    def take_tokens(self, step: PlannedStep, landing: Landing) -> None:
        rows, scores, tell = step.plan.sampled.tolist(), landing.sampled_scores, self._outputs.append
        for index, (row, token) in enumerate(zip(rows, landing.tokens.tolist(), strict=True)):
            sequence = step.sequences[row]
            if sequence.reason is not None:
                continue  # a token beyond its end
            generated = sequence.generated
            generated.append(token)
            output = Output(sequence.id, token)
            tell(output)
            if scores is not None:
                self._add_scores(output, sequence, scores, index)
            if token in sequence.stop_tokens or (sequence.constraint and self._follow(sequence, output)):
                output.finish = FinishReason.STOP
                self._finish(sequence, FinishReason.STOP)
            elif output.finish is None and len(generated) >= sequence.max_tokens:
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
            constraint.take(token)
        except RequestError as error:
            output.finish, output.error, output.error_field = FinishReason.ERROR, str(error), error.field
            self._finish(sequence, FinishReason.ERROR)
            return False
        return constraint.ended

    def _add_scores(self, output: Output, sequence: Sequence, scores: Scores, index: int) -> None:
        wanted = sequence.request.params.logprobs
        if wanted is not None:
            output.logprob, output.top = float(scores.chosen[index]), _top(scores, index, wanted)

    def _finish_silent(self, step: PlannedStep) -> None:
        """Finish sequences that generate no token once their prompt is computed."""
        for sequence, end in zip(step.sequences, step.plan.end.tolist(), strict=True):
            if sequence.max_tokens == 0 and sequence.reason is None and end == len(sequence.known):
                self._finish(sequence, FinishReason.LENGTH)
                self._outputs.append(Output(sequence.id, None, finish=FinishReason.LENGTH))

    def _take_scores(self, step: PlannedStep, landing: Landing) -> None:
        scores, index = landing.prompt_scores, 0
        for sequence, count in step.scored:
            assert scores is not None
            wanted = sequence.request.params.prompt_logprobs or 0
            # A copy: a view would keep the whole step's scores alive as long as this sequence.
            sequence.report.prompt_scores.add(scores.part(index, index + count, wanted).copy())
            index += count


def _top(scores: Scores, index: int, count: int) -> Top:
    tokens, logprobs = scores.top_token[index, :count].tolist(), scores.top_logprob[index, :count].tolist()
    return list(zip(tokens, logprobs, strict=True))
