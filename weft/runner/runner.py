"""Execution of plans: one packed upload, one forward pass, sampling on the device, one download. It decides nothing.

Between steps it keeps the store (pages, states, tails) and the token board: the token last sampled for every seat,
which the next step reads without the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.base.completion import add_masks
from weft.base.plan import Ints, Landing, Plan, Scores
from weft.device.download import Download
from weft.device.host_memory import HostMemory
from weft.device.marks import LayerMarks
from weft.device.store import Store
from weft.device.upload import upload
from weft.engine.device import Capabilities
from weft.kernels.choosing import check_device, choose
from weft.kernels.interface import Batch, Operations
from weft.kernels.ranks import RankGroup, over_ranks
from weft.memory.spec import MemorySpec
from weft.memory.tiers.copies import TiersBelow
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.runner.cuda.marking import marker_of
from weft.runner.cuda.recorded import RecordedSteps, StepRecording, record_steps
from weft.runner.eager import EagerSteps, Numerics, UsualNumerics, check_complete
from weft.runner.passes import ModelPass
from weft.runner.placed import Boards, PlacedModel
from weft.runner.sampler import sample
from weft.runner.step_sampling import StepSampling, StepVectors, stage_sampling

# Limit on the logits of prompt tokens computed at a time, 16 MiB: a CPU's allocator never frees the largest step's
# temporaries.
SCORE_ELEMENTS = 1 << 22
# The same where memory for temporaries is ample: 64 MiB.
RECORDED_SCORE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """`Scores`, still on the device."""

    chosen: Tensor  # [n]
    top_token: Tensor  # [n, k]
    top_logprob: Tensor  # [n, k]


@dataclass(frozen=True, slots=True)
class PromptReads:
    """What a plan reads of prompts, still on the device."""

    scores: DeviceScores | None = None
    vectors: Tensor | None = None  # [vectors, size]


NO_READS = PromptReads()


@dataclass(frozen=True, slots=True)
class RunnerFlight:
    """A launched plan: its downloads, and the parts that it has. `marks` say when its layers were computed."""

    download: Download
    sampled_scores: bool
    prompt_scores: bool
    digests: bool = False
    vectors: bool = False
    marks: LayerMarks | None = None


@dataclass(slots=True)
class WaitingFlight:
    """A launched plan whose sampling waits for masks: its logits, and its flight once they have come."""

    plan: Plan
    logits: Tensor  # [samples, vocab]
    inputs: Tensor  # [tokens] of the step
    reads: PromptReads
    flight: RunnerFlight | None = None
    marks: LayerMarks | None = None


Flight = RunnerFlight | WaitingFlight


class Runner:
    """The device of an engine: a model, its memory and its token board, assembled from parts.

    operations   compute a batch; by default those chosen for the device
    computes     what is computed of a plan: a model, a model whose head reads its states, a head, a draft model
    numerics     in which passes it is computed
    recording    which steps are recorded and replayed; without it, none are
    group        ranks that compute the same plans with other parts of the model; the first one decides on tokens
    """

    def __init__(
        self,
        model: CausalModel,
        spec: MemorySpec,
        budget_bytes: int,
        seats: int,
        device: torch.device | str = "cpu",
        threads: int | None = None,
        operations: Operations | None = None,
        *,
        computes: ModelPass | None = None,
        numerics: Numerics | None = None,
        recording: StepRecording | None = None,
        group: RankGroup | None = None,
        marks_layers: bool = False,
    ) -> None:
        """Create a runner. `threads` of a CPU default to those of the process.

        `marks_layers`: prefixes depart while they are computed.
        """
        place = torch.device(device)
        if operations is None:
            operations = choose(str(device), model_dtype(model), lambda _: spec.memories).operations
        check_device(operations, str(device))
        operations = operations if group is None else over_ranks(operations, group)
        self.numerics = numerics or UsualNumerics()
        scratch = max(self.numerics.scratch_units, int(recording is not None))
        store, boards = Store(spec, budget_bytes, place, scratch), Boards.empty(seats, place)
        placed = PlacedModel(model, spec, operations, place, store, boards, computes or ModelPass())
        self.placed, self.group = placed, group
        self.model, self.spec, self.operations, self.device, self.store = model, spec, operations, place, store
        self.marker = marker_of(model, place.type) if marks_layers else None
        self.tiers = TiersBelow(spec, store, partial(HostMemory, store))
        self.eager = EagerSteps(placed)
        self.recorded: RecordedSteps | None = None
        if recording is not None:
            room = spec.draft_room if self.numerics.records_drafts else 0
            self.recorded = record_steps(placed, seats, recording, room)
        self.score_elements = SCORE_ELEMENTS if recording is None else RECORDED_SCORE_ELEMENTS
        if threads is not None:
            torch.set_num_threads(threads)

    @property
    def capabilities(self) -> Capabilities:
        builds = self.builds_on_flight if self.builds_on_flight(0, 1, 2) else None
        return Capabilities(self.supply_masks, builds, self.recorded, self, self.tiers)

    def builds_on_flight(self, decodes: int, drafting: int, tokens: int) -> bool:
        """Return whether rows of such a step may follow drafts in flight.

        A CPU has computed them by then. A GPU has not: recorded steps place their rows there, and no others.
        """
        recorded = self.recorded
        return self.store.is_host_memory if recorded is None else recorded.builds_on_flight(decodes, drafting, tokens)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        for kind, index in plan.poison:
            self.store.poison(kind, index)
        if self.recorded is None:
            return self.run(self.eager.complete(plan), plan)
        output = self.recorded.replay(plan) if self.numerics.records_drafts or not plan.drafts.counts.any() else None
        if output is None:
            check_complete(plan)
            return self.run(plan)
        every, samples = len(plan.sampled) == plan.rows, plan.sample_count
        wants_more = plan.sampling.wants_logprobs or plan.sampling.wants_digests
        if every and plan.sampling.all_greedy and not wants_more:
            return fly(output.tokens[:samples])
        assert output.logits is not None
        sampling = self.eager.upload(stage_sampling(plan, self.model.vocab_size))
        logits = output.logits[:samples] if every else output.logits[sampling.index]
        # The next step is launched after the masks, so it does not overwrite these logits before.
        if len(plan.sampling.awaiting_mask):
            return WaitingFlight(plan, logits, output.inputs, NO_READS)
        return self.choose(plan, logits, sampling, output.inputs)

    def run(self, plan: Plan, planned: Plan | None = None) -> Flight:
        """Launch the kernels of a complete plan, with marks between the layers if prefixes depart.

        `planned` is the plan before its rows were moved, if they were.
        """
        if self.marker is None:
            return self._run(plan, planned)
        with self.marker.mark() as marks:
            flight = self._run(plan, planned)
        return replace(flight, marks=marks) if marks.are_complete else flight

    def _run(self, plan: Plan, planned: Plan | None) -> Flight:
        """Upload, forward, sample."""
        computes, staged = self.placed.computes, stage_sampling(plan, self.model.vocab_size)
        batch, sampling, inputs, hidden = self.numerics.compute(plan, staged, self.eager)
        if computes.states is not None and not computes.is_head:
            # Rows that were moved have the lines of their plan.
            computes.keep(self.eager.lines_of(planned or plan), hidden)
        reads = self._read_prompts(plan, hidden, batch, sampling) if plan.reads_prompts else NO_READS
        if not len(plan.sampled):
            return fly(sampling.seat, None, reads)
        # A decode-only step needs the logits of every token: no selection.
        last = hidden if len(sampling.index) == len(plan.tokens) else hidden[sampling.index]
        computes.chosen(last, sampling.seat)
        logits = self.logits_of(last, batch, plan.drafts.frequent_only)
        if len(plan.sampling.awaiting_mask):
            return WaitingFlight(plan, logits, inputs, reads)
        return self.choose(plan, logits, sampling, inputs, reads)

    @torch.inference_mode()
    def supply_masks(self, flight: WaitingFlight, masks: Ints) -> None:
        """Launch the sampling of the last flight, whose forward pass may not have ended."""
        plan = add_masks(flight.plan, masks)
        sampling = self.eager.upload(stage_sampling(plan, self.model.vocab_size))
        flight.flight = self.choose(plan, flight.logits, sampling, flight.inputs, flight.reads)

    def logits_of(
        self, hidden: Float[Tensor, "n hidden"], batch: Batch, frequent: bool = False
    ) -> Float[Tensor, "n vocab"]:
        computes, most = self.placed.computes, self.numerics.logit_rows
        if most is None:
            return computes.logits(self.model, hidden, batch, frequent)
        return torch.cat([computes.logits(self.model, rows, batch, frequent) for rows in hidden.split(most)])

    def choose(
        self,
        plan: Plan,
        logits: Float[Tensor, "rows vocab"],
        sampling: StepSampling,
        inputs: Int[Tensor, " tokens"],
        reads: PromptReads = NO_READS,
    ) -> RunnerFlight:
        """Choose a token for every sampled row; write it to the board and download it."""
        boards, computes = self.placed.boards, self.placed.computes
        logits = self.operations.for_sampling(logits)
        digests = self.operations.digest(logits) if sampling.digests else None
        if sampling.earlier_uniform is not None and sampling.draws is not None:
            moved = boards.moved[sampling.seat[sampling.draws.row]].long()
            uniform = sampling.earlier_uniform.gather(1, moved[:, None])[:, 0]
            sampling = replace(sampling, draws=replace(sampling.draws, uniform=uniform))
        tokens = self.decide(logits, sampling, inputs)
        if computes.is_head:
            continues = upload({"continues": plan.from_board[plan.sampled]}, self.device, widen=False)["continues"]
            computes.drafted(tokens, sampling.seat, continues)
        if sampling.boarded is None:
            boards.token[sampling.seat] = tokens
        elif len(sampling.boarded):
            boards.token[sampling.seat[sampling.boarded]] = tokens[sampling.boarded]
        if sampling.drafts is not None:
            self.operations.verify_drafts(tokens, inputs, sampling.drafts, boards.token, boards.refused)
            computes.verified(tokens, sampling.drafts, boards.refused)
        scores = None if sampling.top is None else DeviceScores(*self.operations.score(logits, tokens, sampling.top))
        return fly(tokens, scores, reads, digests)

    def decide(
        self, logits: Float[Tensor, "rows vocab"], sampling: StepSampling, inputs: Int[Tensor, " tokens"]
    ) -> Int[Tensor, " rows"]:
        """Return the token of every sampled row. Over ranks, ties and rounding are decided once: by the first one."""
        if self.group is None:
            return sample(logits, sampling, inputs, self.operations)
        if self.group.rank == 0:
            return self.group.from_first(sample(logits, sampling, inputs, self.operations).long())
        return self.group.from_first(logits.new_empty(len(logits), dtype=torch.int64))

    def has_computed(self, flight: Flight, layer: int) -> bool:
        return self.landed(flight) if flight.marks is None else flight.marks.has_passed(layer)

    def landed(self, flight: Flight) -> bool:
        done = flight.flight if isinstance(flight, WaitingFlight) else flight
        return done is not None and done.download.landed

    def land(self, flight: Flight) -> Landing:
        if isinstance(flight, WaitingFlight):
            assert flight.flight is not None, "a step lands after its masks were supplied"
            flight = flight.flight
        arrays = flight.download.arrays()
        tokens = next(arrays)
        sampled, prompt = (
            Scores(next(arrays), next(arrays), next(arrays)) if there else None
            for there in (flight.sampled_scores, flight.prompt_scores)
        )
        digests = next(arrays).copy().view(np.int64) if flight.digests else None
        return Landing(tokens, sampled, prompt, digests, next(arrays) if flight.vectors else None)

    def close(self) -> None:
        self.tiers.close()

    def _read_prompts(
        self, plan: Plan, hidden: Float[Tensor, "tokens hidden"], batch: Batch, sampling: StepSampling
    ) -> PromptReads:
        scores = self._score_prompt(hidden, batch, sampling, plan.score_top) if len(plan.score_index) else None
        if sampling.vectors is None:
            return PromptReads(scores)
        sums = summed(hidden, sampling.vectors, max(1, self.score_elements // hidden.shape[1]))
        most = self.numerics.logit_rows
        parts = [sums] if most is None else sums.split(most)
        return PromptReads(scores, torch.cat([self.model.vectors(rows, batch) for rows in parts]))

    def _score_prompt(
        self, hidden: Float[Tensor, "tokens hidden"], batch: Batch, sampling: StepSampling, top: int
    ) -> DeviceScores:
        step = max(1, self.score_elements // self.model.vocab_size)
        parts = [
            self.operations.score(self.logits_of(hidden[index], batch), token, top)
            for index, token in zip(sampling.score_index.split(step), sampling.score_token.split(step))
        ]
        return DeviceScores(*(torch.cat(pieces) for pieces in zip(*parts)))


def summed(hidden: Float[Tensor, "tokens hidden"], vectors: StepVectors, rows: int) -> Float[Tensor, "vectors hidden"]:
    """Return sums of hidden states, in single precision; about `rows` of them are gathered at a time.

    They are added in pairs, so that a sum has the same bits whatever other sums a step has.
    """
    width = len(vectors.places)
    if width == 1:
        return hidden[vectors.index].float()
    parts, step = [], max(1, rows // width)
    for index, count in zip(vectors.index.split(step), vectors.count.split(step)):
        rest = hidden[(index[:, None] + vectors.places).clamp(max=len(hidden) - 1)].float()
        # Zeros fill up what is shorter, which changes no sum.
        rest = torch.where((vectors.places < count[:, None])[..., None], rest, 0.0)
        while rest.shape[1] > 1:
            rest = rest[:, 0::2] + rest[:, 1::2]
        parts.append(rest[:, 0])
    return torch.cat(parts)


def fly(
    tokens: Tensor, sampled: DeviceScores | None = None, reads: PromptReads = NO_READS, digests: Tensor | None = None
) -> RunnerFlight:
    parts, prompt, vectors = [tokens], reads.scores, reads.vectors
    for scores in (sampled, prompt):
        parts += [] if scores is None else [scores.chosen, scores.top_token, scores.top_logprob]
    # Downloads have 32-bit numbers.
    parts += [] if digests is None else [digests.view(torch.int32)]
    parts += [] if vectors is None else [vectors]
    return RunnerFlight(
        Download(parts), sampled is not None, prompt is not None, digests is not None, vectors is not None
    )


def model_dtype(model: CausalModel) -> torch.dtype:
    """Return the dtype of a model's activations. A head has its model's."""
    return (model.base if isinstance(model, MtpHead) else model).dtype
