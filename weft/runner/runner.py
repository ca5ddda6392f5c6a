"""Execution of plans: one packed upload, one forward pass, sampling on the device, one download. It decides nothing.

Between steps it keeps the store (pages, states, tails) and the token board: the token last sampled for every seat,
which the next step reads without the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.base.moving import add_masks, move_rows, read_guesses
from weft.base.parts import rows_of_one
from weft.base.plan import Ints, Landing, Plan, Scores
from weft.device.download import Download
from weft.device.host_memory import HostMemory
from weft.device.marks import LayerMarks
from weft.device.staging import StagedValue
from weft.device.store import Store
from weft.device.upload import upload
from weft.engine.device import Capabilities, StepSizes
from weft.kernels.choosing import check_device, choose
from weft.kernels.interface import Batch, Operations, OrderedDecodes
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.memory.tiers.copies import TiersBelow
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.runner.batching import build_batch, build_step
from weft.runner.hidden_states import StateUse, guess_places
from weft.runner.sampler import sample
from weft.runner.step_sampling import StepSampling, stage_sampling

# Limit on the logits of prompt tokens computed at a time, 16 MiB: a CPU's allocator never frees the largest step's
# temporaries.
SCORE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """`Scores`, still on the device."""

    chosen: Tensor  # [n]
    top_token: Tensor  # [n, k]
    top_logprob: Tensor  # [n, k]


@dataclass(frozen=True, slots=True)
class RunnerFlight:
    """A launched plan: its downloads, and the parts that it has. `marks` say when its layers were computed."""

    download: Download
    sampled_scores: bool
    prompt_scores: bool
    digests: bool = False
    marks: LayerMarks | None = None


@dataclass(slots=True)
class WaitingFlight:
    """A launched plan whose sampling waits for masks: its logits, and its flight once they have come."""

    plan: Plan
    logits: Tensor  # [samples, vocab]
    inputs: Tensor  # [tokens] of the step
    prompt_scores: DeviceScores | None
    flight: RunnerFlight | None = None
    marks: LayerMarks | None = None


Flight = RunnerFlight | WaitingFlight


class ComputedStep(NamedTuple):
    """A plan whose layers have been computed. `batch` may be that of a part of it."""

    batch: Batch
    sampling: StepSampling
    inputs: Int[Tensor, " tokens"]
    hidden: Float[Tensor, "tokens hidden"]


class Runner:
    """The device of an engine: a model, its memory and its token board."""

    score_elements = SCORE_ELEMENTS
    scratch_units = 0
    # What steps do with hidden states, if the model has an MTP head or is one.
    use: StateUse | None = None
    # To which it pads its steps, if it does.
    step_sizes: StepSizes | None = None
    # Whether prefixes depart while they are computed.
    marks_layers = False
    # What computes decodes in order, if they can be. Asked once: the question takes as long as a few operators.
    ordered: OrderedDecodes | None = None
    # The plan of the step that is launched, before its rows were moved.
    _planned: Plan | None = None

    def __init__(
        self,
        model: CausalModel,
        spec: MemorySpec,
        budget_bytes: int,
        seats: int,
        device: torch.device | str = "cpu",
        threads: int | None = None,
        operations: Operations | None = None,
    ) -> None:
        """Create a runner. `operations` default to those chosen for the device; `threads` to those of the process."""
        self.model = model
        self.spec = spec
        self.device = device
        if operations is None:
            operations = choose(str(device), model_dtype(model), lambda _: spec.memories).operations
        check_device(operations, str(device))
        self.operations = operations
        self.store = Store(spec, budget_bytes, device, self.scratch_units)
        self.tiers = TiersBelow(spec, self.store, partial(HostMemory, self.store))
        self.board = torch.zeros(seats, dtype=torch.int64, device=device)
        # By seat: wrong drafts of the last row, and by how many positions the present one was moved for them.
        self.refused, self.moved = (torch.zeros(seats, dtype=torch.int32, device=device) for _ in range(2))
        self.compute = operations.record_decodes(self.forward)
        self.ordered = self.compute if isinstance(self.compute, OrderedDecodes) else None
        if threads is not None:
            torch.set_num_threads(threads)

    def follows(self, decodes: int, drafting: int, tokens: int) -> bool:
        """Return whether rows of such a step may follow drafts in flight. A CPU has computed them by then.

        Plain operations on a GPU have not, and the host places their rows.
        """
        return self.store.is_host_memory

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        for kind, index in plan.poison:
            self.store.poison(kind, index)
        self._planned = plan
        if plan.drafts.may_move:
            plan = move_rows(plan, self.refused.numpy()[plan.seat], self.spec.cell)
        if len(plan.drafts.on_device) and self.store.is_host_memory:
            assert self.use is not None, "guesses are where hidden states are"
            board = self.use.states.board
            plan = read_guesses(plan, board.refused.numpy()[plan.seat], board.tokens.numpy()[plan.seat])
        return self.run(plan)

    def run(self, plan: Plan) -> Flight:
        """Upload, forward, sample."""
        staged = stage_sampling(plan, self.model.vocab_size)
        batch, sampling, inputs, hidden = self.run_layers(plan, staged)
        self.keep_hidden(plan, hidden)
        prompt_scores = self._score_prompt(hidden, batch, sampling, plan.score_top) if len(plan.score_index) else None
        if not len(plan.sampled):
            return fly(sampling.seat, None, prompt_scores)
        # A decode-only step needs the logits of every token: no selection.
        last = hidden if len(sampling.index) == len(plan.tokens) else hidden[sampling.index]
        logits = self.logits_of(last, batch)
        if len(plan.sampling.late):
            return WaitingFlight(plan, logits, inputs, prompt_scores)
        return self.choose(logits, sampling, inputs, prompt_scores)

    @torch.inference_mode()
    def supply_masks(self, flight: WaitingFlight, masks: Ints) -> None:
        """Launch the sampling of the last flight, whose forward pass may not have ended."""
        sampling = self.upload(stage_sampling(add_masks(flight.plan, masks), self.model.vocab_size))
        flight.flight = self.choose(flight.logits, sampling, flight.inputs, flight.prompt_scores)

    def run_layers(self, plan: Plan, staged: StagedValue) -> ComputedStep:
        """Return the batch of a plan, its sampling, its tokens, and their final hidden states."""
        where = (self.spec, self.board, self.device, self.operations, staged)
        single = None if self.ordered is None else rows_of_one(plan, self.spec.cell)
        if single is not None:
            batch, sampling = build_step(single, *where)
            hidden = self.replay_in_order(single, batch)
            if hidden is not None:
                return ComputedStep(batch, sampling, batch.token_ids, hidden)
        batch, sampling = build_step(plan, *where)
        self.read_guesses(plan, batch.token_ids)
        return ComputedStep(batch, sampling, batch.token_ids, self.compute(batch))

    def read_guesses(self, plan: Plan, ids: Int[Tensor, " tokens"]) -> None:
        """Replace those of a plan's tokens that only the device knows."""
        if len(plan.drafts.on_device):
            assert self.use is not None, "guesses are where hidden states are"
            sent = upload({"place": guess_places(plan)}, self.device, widen=False)
            self.use.states.board.read(ids, sent["place"])

    def keep_hidden(self, plan: Plan, hidden: Float[Tensor, "tokens hidden"]) -> None:
        """Keep the final hidden states of a step, if an MTP head reads them."""
        if self.use is not None:
            # Rows that were moved have the lines of their plan.
            planned = plan if self._planned is None else self._planned
            self.use.states.write(self.lines_of(planned, self.use), hidden)

    def lines_of(self, plan: Plan, use: StateUse) -> Int[Tensor, " tokens"]:
        return upload({"lines": use.lines(plan)}, self.device, widen=False)["lines"]

    def replay_in_order(self, plan: Plan, batch: Batch) -> Float[Tensor, "rows hidden"] | None:
        """Return the final hidden states of rows of one token, each of which may read what the one before it writes.

        None: only recorded steps of C++ kernels can compute them together, and this one is not recorded.
        """
        if self.ordered is None:
            return None
        # With all drafts that fit, a convolution's ring overwrites inputs that the step's first token reads.
        has_tails = Kind.TAIL in self.store.unit_bytes
        used = set(map(int, plan.tail)) if has_tails and self.ordered.is_new(batch) else set[int]()
        before = {index: self.store.unit(Kind.TAIL, index).clone() for index in used}
        hidden = self.ordered.in_order(batch)
        if hidden is None:
            for index, contents in before.items():
                self.store.unit(Kind.TAIL, index).copy_(contents)
        return hidden

    def build_batch(self, plan: Plan) -> Batch:
        """Return the batch of a plan, or of a part of one."""
        return build_batch(plan, self.spec, self.board, self.device, self.operations)

    def upload(self, staged: StagedValue) -> StepSampling:
        """Return a staged sampling with its arrays on the device."""
        found: StepSampling = staged.finish(upload(staged.arrays(), self.device))
        return found

    def logits_of(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        found: Tensor = self.model.logits(hidden, batch)
        return found

    def forward(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the final hidden states of a step."""
        hidden: Tensor = self.model(batch, self.store.views)
        return hidden

    def choose(
        self,
        logits: Float[Tensor, "rows vocab"],
        sampling: StepSampling,
        inputs: Int[Tensor, " tokens"],
        prompt_scores: DeviceScores | None = None,
    ) -> RunnerFlight:
        """Choose a token for every sampled row; write it to the board and download it."""
        logits = self.operations.for_sampling(logits)
        digests = self.operations.digest(logits) if sampling.digests else None
        if sampling.early is not None and sampling.draws is not None:
            moved = self.moved[sampling.seat[sampling.draws.row]].long()
            uniform = sampling.early.gather(1, moved[:, None])[:, 0]
            sampling = replace(sampling, draws=replace(sampling.draws, uniform=uniform))
        tokens = self.decide(logits, sampling, inputs)
        if sampling.boarded is None:
            self.board[sampling.seat] = tokens
        elif len(sampling.boarded):
            self.board[sampling.seat[sampling.boarded]] = tokens[sampling.boarded]
        if sampling.drafts is not None:
            self.operations.verify_drafts(tokens, inputs, sampling.drafts, self.board, self.refused)
            if self.use is not None:
                self.use.verified(tokens, sampling.drafts, self.refused)
        scores = None if sampling.top is None else DeviceScores(*self.operations.score(logits, tokens, sampling.top))
        return fly(tokens, scores, prompt_scores, digests)

    def decide(
        self, logits: Float[Tensor, "rows vocab"], sampling: StepSampling, inputs: Int[Tensor, " tokens"]
    ) -> Int[Tensor, " rows"]:
        """Return the token of every sampled row."""
        return sample(logits, sampling, inputs, self.operations)

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
        return Landing(tokens, sampled, prompt, digests)

    @property
    def capabilities(self) -> Capabilities:
        follows = self.follows if self.follows(0, 1, 2) else None
        return Capabilities(self.supply_masks, follows, self.step_sizes, self, self.tiers)

    def close(self) -> None:
        self.tiers.close()

    def _score_prompt(
        self, hidden: Float[Tensor, "tokens hidden"], batch: Batch, sampling: StepSampling, top: int
    ) -> DeviceScores:
        step = max(1, self.score_elements // self.model.vocab_size)
        parts = [
            self.operations.score(self.logits_of(hidden[index], batch), token, top)
            for index, token in zip(sampling.score_index.split(step), sampling.score_token.split(step))
        ]
        return DeviceScores(*(torch.cat(pieces) for pieces in zip(*parts)))


def fly(
    tokens: Tensor, sampled: DeviceScores | None, prompt: DeviceScores | None, digests: Tensor | None = None
) -> RunnerFlight:
    parts = [tokens]
    for scores in (sampled, prompt):
        parts += [] if scores is None else [scores.chosen, scores.top_token, scores.top_logprob]
    # Downloads have 32-bit numbers.
    parts += [] if digests is None else [digests.view(torch.int32)]
    return RunnerFlight(Download(parts), sampled is not None, prompt is not None, digests is not None)


def model_dtype(model: CausalModel) -> torch.dtype:
    """Return the dtype of a model's activations. A head has its model's."""
    return (model.base if isinstance(model, MtpHead) else model).dtype
