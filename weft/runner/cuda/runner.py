"""The device of an engine on a GPU: replays most steps, runs long prompts eagerly, and never waits in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from weft.base.plan import Plan
from weft.device.host_memory import HostMemory
from weft.device.marks import LayerMarks
from weft.device.store import Store
from weft.kernels.choosing import check_device, everywhere
from weft.kernels.interface import Operations
from weft.memory.spec import MemorySpec
from weft.memory.tiers.copies import TiersBelow
from weft.models.decoder import DecoderModel
from weft.models.model import CausalModel, Mixer
from weft.runner.cuda.compiling import warm_mixers
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.padding import Size, StepInputs
from weft.runner.cuda.recorded import Boards, RecordedSteps, StepOutput, draft_counts, step_sizes
from weft.runner.cuda.shared_prefixes import members_of
from weft.runner.hidden_states import StateUse
from weft.runner.runner import Flight, Runner, WaitingFlight, fly
from weft.runner.step_sampling import stage_sampling

# The CPU's limit, raised because memory for temporaries is ample here: 64 MiB.
SCORE_ELEMENTS = 1 << 24


class CudaRunner(Runner):
    """Runner on a GPU. `max_length` is a row's maximum length. On a CPU (in tests) it works without recording.

    `use` is what steps do with hidden states.
    """

    # Whether all samples are guesses, the most likely tokens.
    drafter = False
    score_elements = SCORE_ELEMENTS
    scratch_units = 1

    def __init__(
        self,
        model: CausalModel,
        spec: MemorySpec,
        budget_bytes: int,
        seats: int,
        max_length: int,
        device: torch.device | str = "cuda",
        progress: bool = False,
        operations: Operations | None = None,
        use: StateUse | None = None,
    ) -> None:
        self.use = use
        self.model, self.spec, self.device = model, spec, torch.device(device)
        self.operations = everywhere("cuda") if operations is None else operations
        check_device(self.operations, str(device))
        self.store = Store(spec, budget_bytes, self.device, self.scratch_units)
        self.tiers = TiersBelow(spec, self.store, partial(HostMemory, self.store))
        self.compute = self.forward
        # One line more than seats: that of padding.
        self.board = torch.zeros(seats + 1, dtype=torch.int64, device=self.device)
        self.refused, self.moved = (torch.zeros(seats + 1, dtype=torch.int32, device=self.device) for _ in range(2))
        if self.device.type == "cuda":
            warm_mixers(model, self.operations)
        cells = -(-max_length // spec.cell)
        line = None if use is None else use.states.padding
        where = (cells, spec, self.store.scratch, self.device, self.operations, line)
        decodes = DecodeInputs(seats, *where)
        prompts = [StepInputs(size, seats, *where) for size in self.recorded_sizes(seats)]
        sizes = [each.size for each in prompts if each.size.samples is not None]
        # By rows. If steps with drafts are not recorded, any number of them is computed in the same way.
        self._draft_counts = [draft_counts(sizes, rows) for rows in range(seats + 1)] if sizes else []
        self.step_sizes = self
        boards = Boards(self.board, self.refused, self.moved)
        parts = (model, self.store.views, boards, decodes, prompts)
        with torch.inference_mode():
            self.recorded = RecordedSteps(*parts, use, self.drafter, members_of(model, self.operations))
            if self.device.type == "cuda":
                self.recorded.record_all(progress)

    def recorded_sizes(self, seats: int) -> list[Size]:
        """Return the sizes of steps with longer rows to record."""
        return step_sizes(seats, self.spec.draft_room, self.drafter)

    def follows(self, decodes: int, drafting: int, tokens: int) -> bool:
        """Return whether such a step is recorded, also if drafts of some rows find no memory."""
        sizes = (inputs.size for inputs in self.recorded.prompts if inputs.follows)
        return any(size.holds(decodes, drafting, tokens) for size in sizes)

    def padded_tokens(self, rows: int, drafts: int) -> int:
        """Return how many tokens a step of these rows and drafts computes."""
        return self.recorded.padded_tokens(rows, drafts)

    def draft_counts(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of drafts that fill the recorded steps for these rows; None: none is for drafts."""
        return self._draft_counts[rows] if self._draft_counts else None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        for kind, index in plan.poison:
            self.store.poison(kind, index)
        output = self._replay(plan)
        if output is None:
            assert not plan.drafts.may_move, "only recorded steps have rows that follow drafts in flight"
            ends_move = len(plan.drafts.unverified_inside) > 0
            assert not ends_move, "only recorded steps have rows that end where drafts in flight do"
            return self.run(plan)
        every, samples = len(plan.sampled) == plan.rows, plan.sample_count
        wants_more = plan.sampling.wants_logprobs or plan.sampling.wants_digests
        if every and plan.sampling.all_greedy and not wants_more:
            return fly(output.tokens[:samples], None, None)
        assert output.logits is not None
        sampling = self.upload(stage_sampling(plan, self.model.vocab_size))
        logits = output.logits[:samples] if every else output.logits[sampling.index]
        # The next step is launched after the masks, so it does not overwrite these logits before.
        if len(plan.sampling.late):
            return WaitingFlight(plan, logits, output.inputs, None)
        return self.choose(logits, sampling, output.inputs)

    def run(self, plan: Plan) -> Flight:
        """Launch the kernels of a step one by one, with marks between the layers if prefixes depart."""
        if not self.marks_layers or not self.store.buffer.is_cuda or not isinstance(self.model, DecoderModel):
            return super().run(plan)
        decoder = self.model.model
        marks = LayerMarks(len(decoder.layers), blocks_of_mixers(self.model))
        decoder.passed = marks.add
        try:
            flight = super().run(plan)
            return replace(flight, marks=marks) if marks.are_complete else flight
        finally:
            decoder.passed = None

    def _replay(self, plan: Plan) -> StepOutput | None:
        """Run a recorded step, if one fits and computes everything that the plan asks for."""
        decodes_only = len(plan.tokens) == plan.rows
        every = len(plan.sampled) == plan.rows
        if len(plan.score_index) or not len(plan.sampled) or not (every or (decodes_only and not self.drafter)):
            return None
        return self.recorded.run(plan)


def blocks_of_mixers(model: DecoderModel) -> tuple[int, ...]:
    """Return the block of every mixer, by the mixer's index."""
    blocks = enumerate(model.model.layers)
    found = {part.index: block for block, layer in blocks for part in layer.modules() if isinstance(part, Mixer)}
    return tuple(found[index] for index in sorted(found))
